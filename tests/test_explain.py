"""`explain` prints a small network at each stage, as text that stays the same."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import dafjax
from dafjax._passes.pipeline import NAMES
from dafjax.policies import CompressExpensive


_GOLDEN = pathlib.Path(__file__).parent / "golden"


def mlp(params, x):
    """Three layers, ReLU between them."""
    for w in params[:-1]:
        x = jax.nn.relu(x @ w)
    return jnp.mean((x @ params[-1]) ** 2)


def attention(w, x):
    """Scores of one head, and what they weigh."""
    q, k, v = jnp.split(x @ w, 3, axis=-1)
    scores = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 8)
    return jnp.sum(jnp.tanh(scores @ v))


def looped(w, x):
    """A scan over four layers."""
    x, _ = jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)
    return jnp.sum(x**2)


_NETWORKS = {
    "mlp": (mlp, [jnp.zeros((64, 64))] * 3, jnp.zeros((512, 64))),
    "attention": (attention, jnp.zeros((64, 192)), jnp.zeros((4, 128, 64))),
    "looped": (looped, jnp.zeros((4, 64, 64)), jnp.zeros((512, 64))),
}


def printed(capsys, name, stage, **options):
    """Returns what is printed, without line numbers."""
    loss, params, x = _NETWORKS[name]
    wrapped = dafjax.remat_compress(loss, **options)
    dafjax.explain(lambda p: wrapped(p, x), params, stage=stage)
    # Neither folders nor lines.
    return re.sub(r"\S*?(\w+\.py):[\d:]+", r"\1", capsys.readouterr().out)


@pytest.mark.skipif(
    not jax.__version__.startswith("0.10."), reason="recorded with jax 0.10"
)
@pytest.mark.parametrize("name", _NETWORKS)
def test_listings_are_as_recorded(name, capsys):
    """If a change is wanted, delete the file, run the test twice and read the diff."""
    # JAX remembers the line that first called `jax.nn.relu`, say.
    jax.clear_caches()
    text = "".join(
        f"== {stage}\n{printed(capsys, name, stage)}"
        for stage in ("program", "passes", "plan", "schedule")
    )
    golden = _GOLDEN / f"explain_{name}.txt"
    if not golden.exists():
        golden.write_text(text, encoding="utf-8")
        pytest.fail(f"{golden} was missing and has been written")
    assert text == golden.read_text(encoding="utf-8")


def test_a_pass_that_is_left_out_is_named(capsys):
    text = printed(capsys, "mlp", "passes", without_passes=["relu_mask"])
    assert "relu_mask: left out" in text
    assert "select_rectified" not in text
    assert "select_rectified" in printed(capsys, "mlp", "passes")
    assert "select_rectified" not in printed(
        capsys, "mlp", "plan", without_passes=["relu_mask"]
    )


def test_every_pass_is_listed_with_its_reason(capsys):
    lines = printed(capsys, "mlp", "passes").splitlines()
    names = [line.split(":")[0] for line in lines if re.match(r"\w+: ", line)]
    assert tuple(names) == NAMES


def test_a_function_with_nothing_to_compress(capsys):
    wrapped = dafjax.remat_compress(lambda x: jnp.sum(x * 2.0))
    dafjax.explain(wrapped, jnp.ones(4))
    assert "nothing to compress" in capsys.readouterr().out


def test_errors_name_the_argument_and_the_remedy():
    with pytest.raises(ValueError, match=r"`explain\(stage=...\)` must be one of"):
        dafjax.explain(dafjax.remat_compress(jnp.sin), 1.0, stage="plans")
    with pytest.raises(ValueError, match="Wrap it first"):
        dafjax.explain(jnp.sin, 1.0)


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["relu"], ValueError, "must hold names of passes, but got 'relu'"),
        ("relu_mask", TypeError, "must be a sequence of names"),
        (3, TypeError, "must be a sequence of names"),
    ],
)
def test_passes_to_leave_out_are_checked(names, error, message):
    with pytest.raises(error, match=message):
        dafjax.remat_compress(jnp.sin, without_passes=names)


def test_keyword_arguments_may_be_shapes(capsys):
    wrapped = dafjax.remat_compress(
        lambda w, *, x: jnp.sum(jnp.tanh(x @ w) ** 2), policy=CompressExpensive()
    )
    w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (512, 64)))
    dafjax.explain(wrapped, w, x=x)
    assert "save %" in capsys.readouterr().out
