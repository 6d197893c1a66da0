"""GPUs that programs are compiled for where there is none, by descriptions of them.

XLA's compiler asks a description, not a device. Its fields are those of XLA's
`GpuTargetConfigProto`. What decides about memory is little: the compute capability,
from which kernels, layouts and libraries follow, and the number of multiprocessors,
which splits reductions. They are of whole devices at their highest power mode.

Sources: of H200 XLA's own `xla/backends/gpu/target_config/specs/h200.txtpb`. Threads,
registers and shared memory of the others are those of their compute capability in the
CUDA C++ Programming Guide; multiprocessors, clocks, bandwidth and memory are from
NVIDIA's data sheets of Jetson AGX Orin 64 GB and Jetson T5000.
"""

import dataclasses
from typing import final

import jax
import numpy as np
from jax.experimental import topologies

import dafjax


@final
@dataclasses.dataclass(frozen=True)
class GPU:
    """What XLA is told of a device.

    Attributes:
        name: As the driver has it.
        compute_capability: Major and minor.
        multiprocessors: Their number.
        threads: Threads that are resident in one of them.
        shared_nbytes: Shared memory of one of them. A block may have 1 KiB less.
        l2_nbytes: The second-level cache.
        clock_ghz: The highest clock.
        bandwidth: Bytes per second of the memory.
        memory_nbytes: The memory; of Jetsons it is the host's too.
    """

    name: str
    _: dataclasses.KW_ONLY
    compute_capability: tuple[int, int]
    multiprocessors: int
    threads: int
    shared_nbytes: int
    l2_nbytes: int
    clock_ghz: float
    bandwidth: int
    memory_nbytes: int

    def target_config(self) -> str:
        """Returns the description as XLA reads it."""
        major, minor = self.compute_capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared_nbytes}
              threads_per_core_limit: {self.threads}
              core_count: {self.multiprocessors}
              fpus_per_core: 128
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              memory_bandwidth: {self.bandwidth}
              l2_cache_size: {self.l2_nbytes}
              clock_rate_ghz: {self.clock_ghz}
              device_memory_size: {self.memory_nbytes}
              shared_memory_per_block_optin: {self.shared_nbytes - 1024}
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              # Without these versions XLA makes no CUDA graphs.
              driver_version: "13.0.0"
              runtime_version: "13.0.0"
              compile_time_toolkit_version: "13.0.0"
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 12 }}
            runtime_version {{ major: 13 }}
            device_description_str: "{self.name}"
        """


GPUS = {
    "H200": GPU(
        "NVIDIA H200",
        compute_capability=(9, 0),
        multiprocessors=132,
        threads=2048,
        shared_nbytes=228 * 1024,
        l2_nbytes=50 * 2**20,
        clock_ghz=1.98,
        bandwidth=4_800_000_000_000,
        memory_nbytes=151_397_597_184,
    ),
    "Orin": GPU(
        "Orin",
        compute_capability=(8, 7),
        multiprocessors=16,
        threads=1536,
        shared_nbytes=164 * 1024,
        l2_nbytes=4 * 2**20,
        clock_ghz=1.3,
        bandwidth=204_800_000_000,
        memory_nbytes=64 * 2**30,
    ),
    "Thor": GPU(
        "NVIDIA Thor",
        compute_capability=(11, 0),
        multiprocessors=20,
        threads=1536,
        shared_nbytes=228 * 1024,
        l2_nbytes=32 * 2**20,
        clock_ghz=1.575,
        bandwidth=273_000_000_000,
        memory_nbytes=128 * 2**30,
    ),
}


def one_device(gpu: GPU) -> jax.sharding.Sharding:
    """Returns the sharding of arrays that are whole on one such GPU.

    Raises:
        RuntimeError: JAX's CUDA plugin is not installed.
    """
    if not dafjax.cuda_status().plugins:
        raise RuntimeError(
            "JAX's CUDA plugin compiles for a GPU where there is none, and is not "
            "installed. `make bench-gpu-programs` and `make test-gpu-programs` use it "
            "from a folder of its own; otherwise install the extra `gpu-programs`."
        )
    topology = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=gpu.target_config()
    )
    mesh = jax.sharding.Mesh(np.array(topology.devices), ("device",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
