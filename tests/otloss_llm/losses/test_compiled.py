"""`torch.compile` of a program around each token loss: the numbers, gradients and errors of the eager program."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from otloss_llm import EMO, MLE, EmbeddingCost, TokenLoss, dense_token_loss, emo_loss, linear_token_loss, token_loss
from tests.otloss_llm.oracles import relative_error
from tests.samples import sampled

# torch itself asks a non-leaf tensor for its gradient where a graph breaks.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
EMBEDDING = torch.randn(23, 6, generator=torch.Generator().manual_seed(0))
COST = EmbeddingCost(EMBEDDING)

# name -> the loss of hidden states times a head
FACES: dict[str, Callable[[Tensor, Tensor, Tensor], TokenLoss]] = {
    "linear_token_loss": lambda h, w, y: linear_token_loss(h, w, y, objective=EMO(), cost=COST),
    "token_loss": lambda h, w, y: token_loss(h @ w.T, y, objective=EMO(), cost=COST),
    "emo_loss": lambda h, w, y: TokenLoss(emo_loss(h @ w.T, y, EMBEDDING), torch.zeros(()), None),
    "dense_token_loss": lambda h, w, y: dense_token_loss(
        h @ w.T, torch.nn.functional.one_hot(y.clamp(min=0), 23).float(), objective=EMO(), cost=COST
    ),
}


@pytest.fixture(autouse=True)
def fresh_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def batch(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    labels = torch.randint(23, (2, length), generator=generator)
    labels[0, :2] = -100
    return torch.randn(2, length, 6, generator=generator), labels


@pytest.mark.parametrize("name", sampled(2, FACES))
def test_numbers_of_the_eager_program(name: str) -> None:
    """At changing lengths, in the middle of a program, with gradients; under autocast, too."""

    def program(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return 3.0 * FACES[name](torch.tanh(2.0 * hidden), weight, labels).loss

    run = torch.compile(program, backend="aot_eager")
    for length, autocast in ((9, False), (4, False), (9, True)):
        hidden, labels = batch(length)
        results = []
        for call in (run, program):
            leaves = [hidden.clone().requires_grad_(), EMBEDDING.clone().requires_grad_()]
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = call(*leaves, labels)
            results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
        for got, want in zip(*results, strict=True):
            assert relative_error(got, want) < (2e-2 if autocast else 1e-6)


def test_another_objective_in_the_same_program() -> None:
    """A compiled program must not keep the objective of its first call."""
    hidden, labels = batch(7)
    run = torch.compile(token_loss, backend="eager")
    for objective in (EMO(0.5), MLE()):
        got, want = (f(hidden @ EMBEDDING.T, labels, objective=objective, cost=COST).loss for f in (run, token_loss))
        assert torch.equal(got, want)


@pytest.mark.filterwarnings("ignore")  # the compilers warn
@pytest.mark.parametrize("name", sampled(2, FACES))
def test_recording_a_loss_raises_one_sentence(name: str) -> None:
    hidden, labels = batch(4)
    model = torch.nn.Module()
    model.forward = lambda hidden: FACES[name](hidden, EMBEDDING, labels).loss  # type: ignore[method-assign]
    for way, record in (("torch.jit.trace", torch.jit.trace), ("torch.export", torch.export.export)):
        with pytest.raises(RuntimeError, match=rf"^{name} reads the numbers of its tensors, so {way} cannot record it"):
            record(model, (hidden,))
    with pytest.raises(Exception, match=r"functions of otloss read .* Leave fullgraph=True out"):
        torch.compile(model, backend="eager", fullgraph=True)(hidden)
