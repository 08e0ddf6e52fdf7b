"""The Triton sweeps against the formulas in float64, and the token loss through them.

On a CPU they run in Triton's interpreter, which checks values but no races; with `-m gpu` the same tests run on a GPU.
"""

import math

import pytest
import torch

from otloss.costs import LineCost
from otloss_llm import EMO, MLE, EmbeddingCost, NumberCost, linear_token_loss, token_statistics
from otloss_llm.kernels import rows, rows_triton
from otloss_llm.kernels import weight_gradients as gradients_module
from otloss_llm.kernels.chunked import Tokens
from otloss_llm.kernels.logits import TokenLossConfig, sweeps_for
from otloss_llm.kernels.rows import CostRows
from otloss_llm.kernels.rows_triton import BLOCK
from otloss_llm.objectives import Statistics
from tests.otloss.operations import Operations
from tests.otloss_llm.losses import test_statistics as statistics_cases
from tests.otloss_llm.oracles import OBJECTIVES, dense_values, problem, relative_error, truth
from tests.otloss_llm.scoring import from_logits, fused, gradients

pytest.importorskip("triton")
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        request.getfixturevalue("interpreter")
    elif not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


# ---- the sweeps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "spread", "dtype"),
    [(2, 10.0, torch.float32), (17, 2.0, torch.float32), (BLOCK, 1.0, torch.float32), (BLOCK + 1, 3.0, torch.float16),
     (40, 2.0, torch.bfloat16)],
)  # fmt: skip
def test_values_and_gradients_against_float64(vocab: int, spread: float, dtype: torch.dtype, device: str) -> None:
    z, label, x = statistics_cases.logits(vocab, spread, dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 0.02
    rows_of_cost, cost = (x - x[label][:, None]).abs(), LineCost(x.float())
    statistics_cases.assert_statistics(z, label, rows_of_cost, cost, "triton", tolerance, device)
    x[: vocab // 2] = math.nan
    numbers = NumberCost(x)
    statistics_cases.assert_statistics(
        z, label, numbers.rows(label), NumberCost(x.float()), "triton", tolerance, device
    )


def test_masked_and_certain_rows(device: str) -> None:
    z = torch.full((3, BLOCK + 5), -math.inf)
    z[0, :4] = torch.tensor([40.0, 0.0, -math.inf, 1.0])
    z[1, :2] = torch.tensor([0.0, 30.0])
    z[2, BLOCK + 2] = 0.5  # alone, in the second block
    label = torch.tensor([0, 1, BLOCK + 2])
    bias, there = torch.zeros(BLOCK + 5, device=device), label.to(device)
    leaf = torch.ones(1, 1, device=device).requires_grad_()
    for row, nll in enumerate((math.exp(-40) + math.exp(-39), math.exp(-30), 0.0)):  # log_softmax would say 0
        out = linear_token_loss(
            leaf, bias[:, None], there[row : row + 1], bias=z[row].to(device), objective=MLE(), impl="triton"
        )
        assert float(out.nll) == pytest.approx(nll, rel=64 * EPS * (1 if device == "cpu" else 16))


def test_rows_beyond_2_to_the_31(device: str) -> None:
    """Rows 2^30 entries apart, the third 2^31 from the first, of logits and of costs: an offset in int32 would wrap.

    8 GiB of address space, of which three rows each are touched.
    """
    try:
        far, far_costs = (
            torch.empty(2**31 + 8, dtype=torch.bfloat16, device=device).as_strided((3, 8), (2**30, 1)) for _ in range(2)
        )
    except RuntimeError:
        pytest.skip("not enough address space")
    near, costs = (torch.randn(3, 8, device=device).bfloat16() for _ in range(2))
    far.copy_(near), far_costs.copy_(costs)
    label, which = torch.tensor([3, 1, 5], device=device), torch.tensor([2, 1, 2], device=device)
    sums = rows_triton.softmax_rows(far, label, CostRows(far_costs, which), True)
    for got, want in zip(sums, rows_triton.softmax_rows(near, label, CostRows(costs, which), True), strict=True):
        assert got is not None
        assert torch.equal(got, want)  # type: ignore[arg-type]
    ones = torch.ones(3, device=device)
    for z, rows_ in ((far, far_costs), (near, costs)):
        scales = Tokens.from_sums(sums).coefficients(Statistics(ones, ones), ones)
        rows_triton.gradient_rows(z, sums.top, label, CostRows(rows_, which), scales)
    assert torch.equal(far, near)


# ---- the token loss --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "bias", "scale", "softcap", "reduction"),
    [("emo", torch.float32, False, 0.3, 2.0, "none"), ("user", torch.bfloat16, True, 1.0, 5.0, "none"),
     ("tailr", torch.float16, True, -1.7, 5.0, "sum")],
)  # fmt: skip
def test_errors_are_those_of_the_naive_computation(
    name: str, dtype: torch.dtype, bias: bool, scale: float, softcap: float | None, reduction: str, device: str
) -> None:
    """Loss and gradients err by at most twice the error of the naive computation + 4 eps (1 of 16 bits)."""
    given = problem(5, batch=(16,), bias=bias, dtype=dtype)
    given.scale, given.softcap = scale, softcap
    objective, formula = OBJECTIVES[name]
    value, expected = truth(given, formula, -2.5)
    leaves = given.leaves()
    naive_loss = dense_values(leaves, given, formula)[0].sum()
    naive = [naive_loss, *gradients(naive_loss * -2.5, leaves)]
    there = given.to(device)
    leaves = there.leaves()
    loss = fused(leaves, there, objective=objective, reduction=reduction, impl="triton", chunk_size=5).loss.sum()
    made = [loss, *gradients(loss * -2.5, leaves)]
    eps = torch.finfo(dtype).eps * (4 if dtype == torch.float32 else 1)
    for got, other, true in zip(made, naive, [value.sum(), *expected], strict=True):
        assert relative_error(got.cpu(), true) <= 2 * relative_error(other, true) + eps


def test_weights_and_log_probabilities(device: str) -> None:
    """`token_weight` and `token_statistics` through these sweeps, against full logits in float64."""
    given = problem(8, dtype=torch.float32)
    weights = torch.linspace(0.0, 2.0, given.labels.numel())
    there, wide = given.to(device), given.to(torch.float64)
    leaves, plain = there.leaves(), wide.leaves()
    out = fused(leaves, there, objective=EMO(), impl="triton", token_weight=weights.to(device))
    want = fused(plain, wide, objective=EMO(), impl="reference", token_weight=weights)
    made = token_statistics(*leaves[:2], there.labels, bias=leaves[2], impl="triton", temperature=0.7, chunk_size=7)
    true = token_statistics(*plain[:2], wide.labels, bias=plain[2], impl="reference", temperature=0.7)
    both = [token.log_prob.sum() + token.entropy.square().sum() for token in (made, true)]
    for loss, other in ((out.loss, want.loss), both):
        assert relative_error(loss.cpu(), other.detach()) < 4e-6
        for got, expected in zip(gradients(loss, leaves), gradients(other, plain), strict=True):
            assert relative_error(got.cpu(), expected) < 4e-6


def test_bfloat16_logits_are_never_widened(device: str) -> None:
    given = problem(15, batch=(32,), vocab=64, width=4, ignored=0.0, dtype=torch.bfloat16).to(device)
    for cap, expected in ((None, 64 * 4), (3.0, 16 * 64)):  # the gradient of the head; logits where a cap is
        given.softcap = cap
        with Operations() as ran:
            fused(given.leaves(), given, objective=MLE(), cost=None, chunk_size=16, impl="triton").loss.backward()
        assert ran.largest_float32 == expected


def test_cost_rows_made_in_16_bits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU makes them so: the gradient differs by no more than rounding, and duplicates still cost nothing."""
    given = problem(21, batch=(16,), vocab=300, width=64, dtype=torch.bfloat16)
    given.embedding[7] = 2 * given.embedding[3]
    given.embedding[20] = 0.0
    given = given.to(device)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(TokenLossConfig, "cost_dtype", lambda self, weight, dtype=dtype: dtype)
        leaves, cost = given.leaves(), EmbeddingCost(given.embedding, near_duplicates="keep")
        out = fused(leaves, given, objective=EMO(), cost=cost, impl="triton")
        results.append([out.loss.detach(), *gradients(out.loss, leaves)])
    assert not torch.equal(results[0][1], results[1][1])
    for got, want in zip(results[1], results[0], strict=True):
        assert relative_error(got, want) < 2 * torch.finfo(torch.bfloat16).eps


# ---- choice of the kernel --------------------------------------------------------------------------------------------


def test_triton_where_it_cannot_run_raises() -> None:
    def call(dtype: torch.dtype = torch.float32) -> None:
        from_logits(torch.randn(3, 7, dtype=dtype), torch.tensor([1, 2, 3]), "triton", objective=MLE())

    with pytest.raises(ValueError, match=r'got device cpu, expected a CUDA tensor.*TRITON_INTERPRET=1.*impl="chunked"'):
        call()
    with pytest.raises(ValueError, match=r"got torch\.float64, expected float32"):
        call(torch.float64)


@pytest.mark.gpu
def test_the_choice_of_auto_on_a_gpu() -> None:
    z = torch.empty(1, 1, device="cuda")
    assert sweeps_for(z, "auto") is rows_triton
    assert sweeps_for(z, "chunked") is sweeps_for(z.double(), "auto") is rows


def test_weight_gradients_of_16_bits_add_up_in_float32(device: str, small_blocks: None) -> None:
    in_place = gradients_module._has_float32_products(torch.device(device), torch.bfloat16)
    dz, hidden = (torch.randn(2, 5, n, dtype=torch.bfloat16, device=device) for n in (21, 6))
    total = torch.full((21, 6), torch.nan, device=device)
    for chunk in range(2):
        gradients_module._add_in_float32(total, dz[chunk].T, hidden[chunk], fresh=chunk == 0)
    true = (dz.double().mT @ hidden.double()).sum(0)
    assert relative_error(total, true) < (1e-6 if in_place else 4e-3)
