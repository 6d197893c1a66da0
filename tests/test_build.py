"""The package builds from source, and what is built works elsewhere."""

import os
import pathlib
import shutil
import site
import subprocess
import sys
import venv

import pytest


pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[1]
CHECK = (
    "import dafjax._native._cpu as cpu, dafjax._native; "
    "assert 'dafjax_tie' in cpu.handlers(); print(cpu.__file__)"
)


def _run(*command, cwd, **kwargs):
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        **kwargs,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _copy_of_sources(target):
    """Copies what a checkout holds, so that a build leaves the tree as it is."""
    listed = _run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT)
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    # The readme is part of the metadata.
    (target / "README.md").touch()
    return target


def _environment(folder):
    """Makes an environment that sees this one's packages, apart from dafjax."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    where = "import site; print(site.getsitepackages()[0])"
    packages = pathlib.Path(_run(python, "-c", where, cwd=folder).strip())
    (packages / "outer.pth").write_text("\n".join(site.getsitepackages()))
    return python


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return _copy_of_sources(tmp_path_factory.mktemp("sources"))


@pytest.mark.parametrize("options", [[], ["--editable"]], ids=["wheel", "editable"])
def test_an_installed_package_imports_its_library_elsewhere(sources, tmp_path, options):
    python = _environment(tmp_path / "environment")
    pip = [sys.executable, "-m", "pip", "--python", python]
    _run(
        *pip, "install", "--no-deps", "--no-build-isolation", "--no-index", *options,
        sources, cwd=tmp_path,
    )  # fmt: skip
    path = _run(python, "-c", CHECK, cwd=tmp_path).strip()
    assert not path.startswith(str(ROOT))


def test_a_missing_compiler_is_said_to_be_missing(tmp_path):
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    cmake = shutil.which("cmake")
    ninja = shutil.which("ninja")
    assert cmake is not None
    assert ninja is not None
    done = subprocess.run(
        [cmake, "-S", ROOT / "xla_ffi", "-B", tmp_path / "build", "-G", "Ninja",
         f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DCMAKE_SYSTEM_PREFIX_PATH=",
         "-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode != 0
    message = " ".join(done.stderr.split())
    assert "needs a C++17 compiler" in message
    assert "apt-get install g++" in message
    assert os.listdir(tmp_path / "build")
