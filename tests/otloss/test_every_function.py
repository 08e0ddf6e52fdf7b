"""What holds for every public function: gradients are finite differences, derivatives in forward mode the same or an
error, and what surrounds a call changes nothing: autocast, and torch's defaults of dtype and device."""

import dataclasses
import gc
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.masked import masked_tensor

import otloss
from otloss import losses
from tests.otloss.draws import draw
from tests.otloss.every_function import FUNCTIONS, OF_INDICES, Entry
from tests.otloss.gradient_cases import COSTS, Inputs
from tests.samples import sampled

ENTRIES = {**FUNCTIONS, **OF_INDICES}
# A function with each kind of cost: `make test` takes every fourth.
ON_COSTS = [name for name in FUNCTIONS if name.rpartition(" of ")[2] in COSTS]


def most(names: Iterable[str]) -> list[Any]:
    slow = {name for k, name in enumerate(ON_COSTS) if k % 4}
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


MASSES = ("p", "q", "a", "b", "target")


def test_the_table_holds_every_public_function() -> None:
    names = [(name, value) for module in (otloss, losses) for name, value in vars(module).items() if name[0] != "_"]
    public = {function.__name__ for _, function in names if inspect.isfunction(function)}
    assert public - {"warm_up"} == {name.partition(",")[0].split()[0] for name in ENTRIES}


def upstream(value: Tensor) -> Tensor:
    return torch.linspace(-1, 2, value.numel(), dtype=value.dtype, device="cpu").reshape(value.shape)


def gradients(entry: Entry) -> Inputs:
    found = results(entry, torch.float64)[1:]
    return dict(zip(entry.inputs, found, strict=True)) if found else {}


@pytest.mark.parametrize("name", most(FUNCTIONS))
def test_gradients_are_finite_differences(name: str) -> None:
    """Along a random direction, in which the mass of weights stays; each entry of the value has a factor of its own."""
    entry, step = FUNCTIONS[name], 1e-4
    found = gradients(entry)
    assert found or name == "register"  # whose rotation has no graph
    for given, gradient in found.items():
        point = entry.inputs[given]
        along = torch.randn(point.shape, dtype=point.dtype, generator=torch.Generator().manual_seed(3))
        if given in MASSES:
            along = (along - along.mean(-1, keepdim=True)) * (point > 0)
            along = along - (point > 0) * along.sum(-1, keepdim=True) / (point > 0).sum(-1, keepdim=True)
        ends = [entry.value({**entry.inputs, **entry.fixed, given: point + h * along}).detach() for h in (step, -step)]
        expected = ((ends[0] - ends[1]) * upstream(ends[0])).sum() / (2 * step)
        assert float((gradient * along).sum()) == pytest.approx(float(expected), rel=1e-4, abs=1e-6), given


OF_SCORES = ("ordinal_loss, values", "cumulative_log_probabilities, probit")  # logits of 1e160 are nobody's


@pytest.mark.parametrize("name", [name for name in most(ENTRIES) if name not in OF_SCORES])
def test_numbers_whose_squares_overflow_are_named(name: str) -> None:
    """A kernel that got an infinite cost ended the process."""
    entry = ENTRIES[name]
    inputs = {**entry.inputs, **entry.fixed}
    for dtype, scale in ((torch.float64, 1e160), (torch.float32, 1e25)):
        large = {
            key: (t if key in MASSES else scale * t).to(dtype) if t.is_floating_point() else t
            for key, t in inputs.items()
        }
        try:
            value = entry.value(large)
        except (ValueError, otloss.ConvergenceWarning):
            continue
        assert not value.is_floating_point() or bool(value.isfinite().all())


def by_duals(entry: Entry, given: str, tangent: Tensor) -> Tensor | None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(entry.inputs[given], tangent)
        return forward_ad.unpack_dual(entry.value({**entry.inputs, **entry.fixed, given: dual})).tangent


def by_jvp(entry: Entry, given: str, tangent: Tensor) -> Tensor | None:
    def function(t: Tensor) -> Tensor:
        return entry.value({**entry.inputs, **entry.fixed, given: t})

    return torch.func.jvp(function, (entry.inputs[given],), (tangent,))[1]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize("name", most(FUNCTIONS))
def test_forward_mode_is_right_or_an_error_that_names_the_function(name: str) -> None:
    entry, function = FUNCTIONS[name], name.partition(",")[0].split()[0]
    by_backward = gradients(entry)
    for k, (given, point) in enumerate(entry.inputs.items()):
        tangent = torch.randn(point.shape, dtype=point.dtype, generator=torch.Generator().manual_seed(3))
        for mode in (by_duals,) if k % 2 else (by_duals, by_jvp):  # transforms of a whole solution take long
            message, actual = "", None
            try:
                actual = mode(entry, given, tangent)
            except NotImplementedError as error:
                message = str(error)
            if message:
                assert function in message or "graph_cost" in message, (mode, given, message)
                assert "reverse mode" in message or "torch.autograd.grad" in message or "detached" in message
                continue
            assert actual is not None, (mode, given)
            actual, expected = actual.detach(), float((by_backward[given] * tangent).sum())
            assert float((actual * upstream(actual)).sum()) == pytest.approx(expected, rel=1e-6, abs=1e-8), given


# They work inside of torch.vmap in these inputs, but for a soft label with a cost, which is exact transport.
PER_EXAMPLE = {
    "ordinal_loss", "threshold_loss", "cumulative_log_probabilities", "emd", "sinkhorn", "sinkhorn_divergence",
    "cloud_loss", "wasserstein_1d", "cdf_distance", "wasserstein_circular", "sliced_wasserstein",
}  # fmt: skip
OF_EXAMPLES = {"logits", "score", "sample_weight", "p", "q", "a", "b", "epsilon", "mass"}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no rule for log_ndtr
@pytest.mark.parametrize("name", most(ENTRIES))
def test_vmap_is_a_loop_or_an_error_that_says_to_pass_the_batch(name: str) -> None:
    entry, function = ENTRIES[name], name.partition(",")[0].split()[0]
    for given, point in entry.inputs.items():

        def value(t: Tensor, given: str = given) -> Tensor:
            return entry.value({**entry.inputs, **entry.fixed, given: t})

        def by_grad(t: Tensor, value: Callable[[Tensor], Tensor] = value) -> Tensor:
            return torch.func.grad(lambda t: (upstream(result := value(t)) * result).sum())(t)

        examples = torch.stack([point, point.flip(-1)])
        for transformed in (value, by_grad):
            actual, message = None, ""
            try:
                actual = torch.vmap(transformed)(examples)
            except NotImplementedError as error:
                message = str(error)
            if actual is not None:
                torch.testing.assert_close(actual, torch.stack([transformed(t) for t in examples]))
                continue
            assert message.startswith(function) or "ost does not work inside" in message
            if message.startswith(function):  # elsewhere the entry makes a cost object of what is mapped
                assert function not in PER_EXAMPLE or given not in OF_EXAMPLES or "soft with a cost" in name
            assert "pass the batch itself" in message


def test_gradients_of_each_example_by_vmap() -> None:
    head, X, y = otloss.nn.CumulativeLinkHead(3, 4), torch.randn(5, 3), torch.arange(5) % 4
    weights = dict(head.named_parameters())

    def value(weights: dict[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
        logits = torch.func.functional_call(head, weights, (x,))
        return otloss.ordinal_loss(logits, label, cross_entropy=0.3, ignore_index=-100)

    actual = torch.vmap(torch.func.grad(value), in_dims=(None, 0, 0))(weights, X, y)
    for k in range(5):
        expected = torch.autograd.grad(value(weights, X[k], y[k]), list(weights.values()))
        torch.testing.assert_close([actual[name][k] for name in weights], list(expected))
    for bad, message in ((4, "out of range, the first at (4, 0)"), (-100, "pass the batch itself")):
        y[-1] = bad
        with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)):
            torch.vmap(value, in_dims=(None, 0, 0))(weights, X, y)


def test_transforms_of_torch_func_on_transport() -> None:
    """Jacobians, nested axes at any place, gradients of what is not mapped, and of tensors outside of them."""
    p, q = (draw(3, n, seed=n) for n in (4, 5))
    p, q, cost = p / p.sum(-1, keepdim=True), q[0] / q[0].sum(), draw(4, 5)
    by_torch = cost.clone().requires_grad_()

    def value(p: Tensor, cost: Tensor) -> Tensor:
        return otloss.sinkhorn(p, q, cost, epsilon=0.2)

    expected = [torch.autograd.grad(value(one, by_torch), by_torch)[0] for one in p]
    actual = torch.vmap(torch.func.grad(value, argnums=1), in_dims=(0, None))(p, cost)
    torch.testing.assert_close(list(actual), expected)
    torch.vmap(value, in_dims=(1, None))(p.T, by_torch).sum().backward()
    torch.testing.assert_close(by_torch.grad, sum(expected))
    leaf = p.clone().requires_grad_()
    rows = [torch.autograd.grad(one, leaf, retain_graph=True)[0] for one in value(leaf, cost)]
    torch.testing.assert_close(list(torch.func.jacrev(value)(p, cost)), rows)
    x, y = draw(3, 2, 4, 6, 2), draw(2, 5, 2, seed=1)

    def cloud(x: Tensor, y: Tensor) -> Tensor:
        return otloss.cloud_loss(x, y, epsilon=0.3)

    nested = torch.vmap(torch.vmap(cloud, in_dims=(1, None)), in_dims=(1, 0))(x, y)
    torch.testing.assert_close(nested, cloud(x, y[:, None]).permute(1, 2, 0))
    each = torch.vmap(torch.func.jacrev(cloud))(x[0, 0], y[:1].expand(4, -1, -1))
    torch.testing.assert_close(each, torch.func.grad(lambda x: cloud(x, y[0]).sum())(x[0, 0]))
    with pytest.raises(RuntimeError, match="a second derivative of emd was asked for inside transforms") as caught:
        torch.func.grad(lambda t: torch.func.grad(lambda p: otloss.emd(p, q, cost))(t).sum())(p[0])
    assert "implicit" not in str(caught.value)  # emd takes no `grad`
    with pytest.raises(NotImplementedError, match="Call cloud_loss on the points, which works there"):
        torch.vmap(lambda x: otloss.emd(p[0], q, otloss.costs.PointCost(x, y[0])))(x[0, 0, :, :4])
    outside = otloss.costs.DenseCost(cost.clone().requires_grad_())
    with pytest.raises(NotImplementedError, match=r"^emd gives no gradient of cost inside transforms"):
        torch.vmap(lambda p: otloss.emd(p, q, outside))(p)


def test_levels_around_vmap_get_the_gradients_of_what_it_maps_over() -> None:
    """By `torch.func.grad` of a vmap, by jacrev, and outside of all transforms."""
    p, label, q = (draw(3, 4, seed=seed).softmax(-1) for seed in range(3))
    x, y, cost = draw(3, 4, 2), draw(3, 5, 2, seed=1), draw(4, 4)
    functions: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (lambda p, q: otloss.emd(p, q, cost), (p, q)),
        (lambda p, q: otloss.sinkhorn(p, q, cost, epsilon=0.2, marginal_penalty=(None, 1.0)), (p, q)),
        (lambda x, y: otloss.cloud_loss(x, y, epsilon=0.3), (x, y)),
        (lambda p, q: otloss.wasserstein_1d(p, q, order=1), (p, q)),
        (lambda z, label: otloss.ordinal_loss(z, label, reduction="none"), (q.log(), label)),
    ]
    for function, inputs in functions:
        leaves = [t.clone().requires_grad_() for t in inputs]
        expected = torch.autograd.grad(function(*leaves).square().sum(), leaves)

        def value(*given: Tensor, function: Callable[..., Tensor] = function) -> Tensor:
            return torch.vmap(function)(*given).square().sum()

        torch.testing.assert_close(torch.func.grad(value, argnums=(0, 1))(*inputs), expected)
        torch.testing.assert_close(torch.func.jacrev(value, argnums=(0, 1))(*inputs), expected)
        torch.testing.assert_close(torch.autograd.grad(value(*leaves), leaves), expected)


def test_vmap_maps_penalties_in_a_pair_and_keeps_the_batch_of_a_cost_object() -> None:
    p, q, cost = draw(2, 4), draw(5), draw(2, 4, 5)
    rho, shared = torch.tensor([0.3, 2.0], dtype=p.dtype), otloss.costs.DenseCost(cost)
    for pair in (lambda rho: (None, rho), lambda rho: (rho, 2 * rho)):

        def value(rho: Tensor, p: Tensor, pair: Callable[[Tensor], tuple[Tensor | None, Tensor]] = pair) -> Tensor:
            return otloss.sinkhorn(p, q, shared, epsilon=0.2, marginal_penalty=pair(rho))

        expected = torch.stack([value(one, weights) for one, weights in zip(rho, p, strict=True)])  # (2, batch)
        torch.testing.assert_close(torch.vmap(value)(rho, p), expected)
    clouds = list(draw(2, 3, 2))
    with pytest.raises(NotImplementedError, match="does not take a list as y inside transforms"):
        torch.vmap(lambda x: otloss.cloud_loss(x, clouds))(draw(2, 6, 2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own rules use torch.jit
def test_forward_mode_inside_vmap_is_an_error_that_says_so() -> None:
    eye = torch.eye(2, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"no derivative in forward mode inside torch.vmap.*jacrev"):
        torch.func.hessian(lambda A: otloss.bures_wasserstein(A, eye))(2 * eye)
    p, cost = draw(4) / draw(4).sum(), draw(4, 4)
    with pytest.raises(NotImplementedError, match="no derivative in forward mode"):
        torch.func.jacfwd(lambda p: otloss.sinkhorn(p, None, cost, epsilon=0.1))(p)


def second_derivative(entry: Entry) -> str:
    """Take the second derivatives of a function; return the message of the error, or "" if there are some."""
    leaves = {given: t.clone().requires_grad_() for given, t in entry.inputs.items()}
    value = entry.value({**leaves, **entry.fixed}).sum()
    try:
        if value.requires_grad:
            first = torch.autograd.grad(value, list(leaves.values()), create_graph=True, materialize_grads=True)
            squares = torch.stack([g.square().sum() for g in first])
            if squares.requires_grad:
                torch.autograd.grad(squares.sum(), list(leaves.values()), allow_unused=True)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", most(FUNCTIONS))
def test_a_second_derivative_or_an_error_whose_advice_the_function_takes(name: str) -> None:
    """A keyword that the message names is one of the function, or of another that it names with it."""
    called, message = name.partition(",")[0].split()[0], second_derivative(FUNCTIONS[name])
    for other, keyword in re.findall(r"(?:(\w+)\([^()]*)?\b(\w+)=", message):
        function = getattr(otloss, other or called, None) or getattr(losses, other or called)
        assert keyword == "create_graph" or keyword in inspect.signature(function).parameters, message


@contextmanager
def defaults(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def results(entry: Entry, dtype: torch.dtype, *, autocast: bool = False) -> tuple[Tensor, ...]:
    leaves = {name: t.to(dtype, copy=True).requires_grad_() for name, t in entry.inputs.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):  # the backward pass, too
        value = entry.value({**leaves, **entry.fixed})
        if not value.requires_grad:
            return (value,)
        return value, *torch.autograd.grad(value, list(leaves.values()), upstream(value), materialize_grads=True)


@pytest.mark.parametrize("name", most(ENTRIES))
def test_autocast_and_default_dtype_and_device_change_nothing(name: str) -> None:
    entry = ENTRIES[name]
    for dtype, other in ((torch.float64, torch.float16), (torch.float32, torch.float64)):
        expected = results(entry, dtype)
        with defaults(other):
            actual = results(entry, dtype)
        error = 1e-13 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(actual, expected, rtol=error, atol=error)
        if name != "gradient_penalty":  # autocast is for the critic too
            torch.testing.assert_close(results(entry, dtype, autocast=True), expected, rtol=error, atol=error)


ODD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "NaN": (lambda t: t.index_fill(-1, torch.tensor(0), torch.nan), "NaN|nan"),
    "complex": (lambda t: t.to(torch.complex128), r"dtype torch.complex128"),
    "8 bits": (lambda t: t.to(torch.float8_e4m3fn), r"dtype torch.float8_e4m3fn, expected float16.*call \S+.float\(\)"),
    "sparse": (Tensor.to_sparse, r"layout torch.sparse_coo, expected a dense tensor; call \S+.to_dense\(\)"),
    "masked": (lambda t: masked_tensor(t, t == t), r"is a masked tensor, expected a dense tensor; call \S+to_tensor"),
    "nested": (
        lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
        r"is a nested tensor, expected a dense tensor; pad it with \S+.to_padded_tensor\(0.0\)",
    ),
    "quantized": (
        lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8),
        r"is quantized \(torch.quint8\), expected a dense tensor; call \S+.dequantize\(\)",
    ),
    "meta": (lambda t: t.to("meta"), "on the meta device, which holds no numbers; expected a tensor on a CPU or GPU"),
}
# Of each function the entry with the most inputs. Some change them before the call; NaN in a head's scores reaches the
# loss.
ONCE: dict[str, Entry] = {}
for name, entry in sorted(ENTRIES.items(), key=lambda item: len(item[1].inputs)):
    ONCE[name.partition(",")[0].split()[0]] = entry
CHANGED = {"barycenter", "bures_wasserstein", "gradient_penalty", "soft_labels", "cumulative_log_probabilities"}


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of (MaskedTensors|nested tensors)", "ignore:torch.quantize_per_tensor"
)
@pytest.mark.parametrize("name", sorted(ONCE.keys() - CHANGED))
def test_tensors_that_are_not_plain_numbers_are_named(name: str) -> None:
    inputs = {**ONCE[name].inputs, **ONCE[name].fixed}
    for given, tensor in ONCE[name].inputs.items():
        for kind, (change, message) in ODD.items():
            # The entry itself splits the batch, or takes the dtype.
            if (name, kind) in {("match", "masked"), ("match", "nested"), ("cloud_barycenter", "quantized")}:
                continue
            with pytest.raises((TypeError, ValueError), match=message):
                ONCE[name].value({**inputs, given: change(tensor)})


# Each function once, and the ways back of reductions.
REDUCED = {name.partition(",")[0].split()[0]: name for name in ENTRIES}.values()
REDUCED = sorted({*REDUCED, *(name for name in ENTRIES if "negative" in name or "forbidden" in name)})


@pytest.mark.parametrize("name", [*REDUCED, *sampled(0, sorted(set(ENTRIES) - set(REDUCED)))])
def test_nothing_of_a_call_waits_for_the_collector_of_cycles(name: str) -> None:
    """It counts objects and not bytes, so that the matrices of many calls would pile up."""
    inputs = {key: t.clone().requires_grad_() for key, t in ENTRIES[name].inputs.items()} | ENTRIES[name].fixed

    def call() -> None:
        value = ENTRIES[name].value(inputs)
        if value.requires_grad:
            value.sum().backward()

    call()
    gc.collect()
    gc.disable()
    try:
        call()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [each for each in gc.garbage if isinstance(each, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


# The rotation has no graph, and the points of the penalty are leaves of its own.
@pytest.mark.parametrize("name", sorted(set(REDUCED) & FUNCTIONS.keys() - {"register", "gradient_penalty"}))
def test_a_value_that_is_kept_after_its_backward_pass_keeps_no_other_tensor(name: str) -> None:
    """Programs keep the losses of an epoch for their mean, and would keep a matrix of costs with each of them."""

    def tensors() -> list[Tensor]:
        return [each for each in gc.get_objects() if issubclass(type(each), Tensor)]

    def value_of(inputs: Inputs) -> Tensor:
        return ENTRIES[name].value({**{key: t * 1 for key, t in inputs.items()}, **ENTRIES[name].fixed})

    leaves = {key: t.clone().requires_grad_() for key, t in ENTRIES[name].inputs.items()}
    assert value_of(leaves).requires_grad
    gc.collect()
    before = set(map(id, tensors()))
    value = value_of(leaves)
    value.sum().backward()
    own = {id(value), id(value._base), *(id(t.grad) for t in leaves.values())}
    assert not [(t.shape, t.dtype) for t in tensors() if id(t) not in before | own]
    with pytest.raises(RuntimeError, match="second time"):
        value.sum().backward()


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_negated_views_are_numbers(name: str) -> None:
    """The imaginary part of a conjugated tensor is a view with a bit that numpy cannot read."""
    entry = ENTRIES[name]
    plain = entry.value({**entry.inputs, **entry.fixed})
    negated = {key: torch.complex(t, -t).conj().imag for key, t in entry.inputs.items()}
    assert all(t.is_neg() for t in negated.values())
    torch.testing.assert_close(entry.value({**negated, **entry.fixed}), plain, rtol=1e-9, atol=1e-12)


# Transport, sorts, a closed form, losses; these have a sentence for fullgraph=True.
COMPILED = ("emd", "fused_gromov", "ordinal_loss", "sinkhorn", "sliced_wasserstein", "soft_sort")


@pytest.mark.filterwarnings("ignore")  # the compilers warn
@pytest.mark.parametrize("name", [*COMPILED, *sampled(0, sorted(set(ONCE) - set(COMPILED)))])
def test_compiled_functions_give_the_same_and_recording_them_raises_one_sentence(name: str) -> None:
    entry, inputs = ONCE[name], {**ONCE[name].inputs, **ONCE[name].fixed}

    class Recorded(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return entry.value(dict(zip(inputs, tensors, strict=True)))

    records = {"torch.jit.trace": torch.jit.trace, "torch.export": torch.export.export}
    for way, record in records.items() if name != "cumulative_log_probabilities" else ():
        told = rf"^({name}|\w*[cC]ost\S*) reads the numbers .* so {way} cannot record it"
        with pytest.raises(RuntimeError, match=told):
            record(Recorded(), tuple(inputs.values()))
    torch._dynamo.reset()
    if name == "gradient_penalty":  # the compiler has no second derivatives
        return
    whole = dataclasses.replace(entry, value=torch.compile(entry.value, backend="aot_eager"))
    torch.testing.assert_close(gradients(whole), gradients(entry))
    if name in ("emd", "sliced_wasserstein", "ordinal_loss", "fused_gromov"):  # others break with a word of torch's own
        with pytest.raises(Exception, match=r"functions of otloss read .* Leave fullgraph=True out"):
            torch.compile(Recorded(), backend="eager", fullgraph=True)(*inputs.values())
