"""The plots of a run directory, as PNG files."""

import pathlib
from collections.abc import Sequence

from matplotlib.figure import Figure

from models.run_directory import Record
from models.tasks.task import Metric


# Lines that coincide stay visible: later ones are thinner and broken.
_LINES = (
    {"linewidth": 4.0, "alpha": 0.35},
    {"linewidth": 2.0, "linestyle": "--"},
    {"linewidth": 2.0, "linestyle": ":"},
    {"linewidth": 1.4},
    {"linewidth": 1.4, "linestyle": "-."},
)

_MEMORY_PANELS = (
    ("residual_nbytes", "Saved residuals"),
    ("temp_nbytes", "Compiled temporaries"),
    ("peak_resident_nbytes", "Peak resident memory\n(pale: before training)"),
)


def plot_loss(
    results: Sequence[Record], records: Sequence[Record], path: pathlib.Path
) -> None:
    """Draws training loss by step and quality by epoch, one line per method.

    Args:
        results: One per method, in the order of the legend.
        records: Metrics of the runs of one seed.
        path: The PNG file to write.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    loss_axes, quality_axes = figure.subplots(1, 2)
    metric = Metric(**results[0]["metric"])
    percent = 100 if metric.is_share else 1
    for index, result in enumerate(results):
        line = {"color": f"C{index}", **_LINES[index % len(_LINES)]}
        mine = [r for r in records if r["method"] == result["method"]]
        steps = [r for r in mine if r["kind"] == "step"]
        epochs = [r for r in mine if r["kind"] == "epoch"]
        loss_axes.plot(
            [r["step"] for r in steps],
            [r["loss"] for r in steps],
            label=result["label"],
            **line,
        )
        quality_axes.plot(
            [r["epoch"] for r in epochs],
            [percent * r[metric.key] for r in epochs],
            marker="o",
            markersize=4,
            **line,
        )
    loss_axes.set(xlabel="Step", ylabel="Training loss", yscale="log")
    quality_axes.set(xlabel="Epoch", ylabel=metric.axis)
    quality_axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in (loss_axes, quality_axes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    loss_axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def plot_memory(results: Sequence[Record], path: pathlib.Path) -> None:
    """Draws one bar per method for each kind of memory, in MB.

    Args:
        results: One per method, in order from the top.
        path: The PNG file to write.
    """
    figure = Figure(figsize=(11, 1.6 + 0.45 * len(results)), layout="constrained")
    all_axes = figure.subplots(1, len(_MEMORY_PANELS), sharey=True)
    labels = [result["label"] for result in results]
    colors = [f"C{index}" for index in range(len(results))]
    for axes, (key, title) in zip(all_axes, _MEMORY_PANELS, strict=True):
        megabytes = [(result[key] or 0) / 1e6 for result in results]
        bars = axes.barh(range(len(results)), megabytes, color=colors, height=0.7)
        axes.bar_label(bars, fmt="{:,.1f}", padding=3)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("MB")
        axes.set_xlim(0, 1.25 * max([*megabytes, 1e-3]))
        axes.set_yticks(range(len(results)), labels)
        axes.spines[["top", "right"]].set_visible(False)
    # Python, JAX and the compiler are there before the first step.
    before = [(r["resident_nbytes_before_training"] or 0) / 1e6 for r in results]
    all_axes[-1].barh(range(len(results)), before, color="white", alpha=0.7, height=0.7)
    all_axes[0].invert_yaxis()
    figure.savefig(path, dpi=150)


def plot_bits(records: Sequence[Record], path: pathlib.Path) -> None:
    """Draws the bits of each residual and the bytes of all, by step.

    If it was measured, also the noise of rounding over the noise of the batch.

    Args:
        records: Records of steps, with `bits` and `pool_nbytes`, maybe `noise_share`.
        path: The PNG file to write.
    """
    names = sorted({name for record in records for name in record["bits"]})
    steps = [record["step"] for record in records]
    shares = [100 * record.get("noise_share", 0) for record in records]
    heights = (3, 1, 1) if any(shares) else (3, 1)
    figure = Figure(
        figsize=(10, len(heights) + 0.5 + 0.22 * len(names)), layout="constrained"
    )
    bits_axes, bytes_axes, *others = figure.subplots(
        len(heights), 1, sharex=True, height_ratios=heights
    )
    bits = [[record["bits"].get(name, 0) for record in records] for name in names]
    image = bits_axes.imshow(
        bits,
        aspect="auto",
        interpolation="nearest",
        extent=(steps[0] - 0.5, steps[-1] + 0.5, len(names) - 0.5, -0.5),
        vmin=0,
        vmax=8,
        cmap="viridis",
    )
    labels = [name.split(" @")[0] for name in names]
    bits_axes.set_yticks(range(len(names)), labels, fontsize=7)
    figure.colorbar(image, ax=bits_axes, label="Bits")
    megabytes = [record["pool_nbytes"] / 1e6 for record in records]
    bytes_axes.plot(steps, megabytes, color="C0")
    bytes_axes.set(ylabel="Codes (MB)", ylim=(0, 1.1 * max(megabytes)))
    for axes in others:
        axes.plot(steps, shares, color="C1")
        axes.set(ylabel="Noise (% of\nthe batch's)", ylim=(0, 1.1 * max(shares)))
    lines = (bytes_axes, *others)
    lines[-1].set_xlabel("Step")
    for axes in lines:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
