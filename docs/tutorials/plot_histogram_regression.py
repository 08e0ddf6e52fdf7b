"""
A number as a histogram, calibrated
===================================

A regression that answers with one number does not say how sure it is. A network can answer with a histogram instead:
`histogram_loss` is the transport between the predicted histogram and the number that came true. The noise of the data
here grows with x, and the histograms have to follow it.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

from otloss.estimators import Temperature
from otloss.losses import decode_classes, histogram_loss
from otloss.metrics import ranked_probability_score
from otloss.plotting import plot_pit

torch.manual_seed(0)
x = torch.rand(3000, 1)
y = (torch.sin(5 * x) + (0.05 + 0.5 * x) * torch.randn(3000, 1))[:, 0].clamp(-2.4, 2.4)
train, held_out, test = slice(0, 1500), slice(1500, 2000), slice(2000, 3000)
edges = torch.linspace(-2.5, 2.5, 51)

# %%
# The same network twice, with a little cross-entropy. With power 2, the default, the loss is least at the true
# distribution. With power 1 it is the expected distance: it gives good numbers, and histograms that are too narrow.


def fit(**settings):
    network = torch.nn.Sequential(
        torch.nn.Linear(1, 64), torch.nn.SiLU(), torch.nn.Linear(64, 64), torch.nn.SiLU(), torch.nn.Linear(64, 50)
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(400):
        batch = torch.randint(1500, (256,))
        loss = histogram_loss(network(x[batch]), y[batch], edges, outside="clamp", **settings)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network


networks = {"power 2": fit(cross_entropy=0.05), "power 1": fit(power=1, cross_entropy=0.02)}
grid = torch.linspace(0, 1, 200)[:, None]
figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
for axis, (name, network) in zip(axes, networks.items(), strict=True):
    density = network(grid).softmax(-1).detach()
    axis.imshow(density.T, origin="lower", extent=(0, 1, -2.5, 2.5), aspect="auto", cmap="Blues", vmax=0.25)
    axis.scatter(x[test][::4], y[test][::4], s=3, color="C1", label="test data")
    axis.set(title=f"Histograms of {name}", xlabel="x")
axes[0].set_ylabel("y")
axes[0].legend(loc="lower left")

# %%
# Calibration corrects the second one without new training: one temperature, learned on rows that were held out. The
# median as the answer hardly changes, and the score of the distribution falls.

bins = torch.bucketize(y, edges[1:-1])
logits = networks["power 1"](x).detach()
narrow = logits.softmax(-1).double().numpy()
temperature = Temperature().fit(narrow[held_out], bins[held_out])
corrected = temperature.predict(narrow[test])
print(f"temperature {temperature.temperature_:.2f}")
for name, forecast in (("as trained", narrow[test]), ("calibrated", corrected)):
    score = ranked_probability_score(bins[test], forecast, labels=np.arange(50))
    middle = decode_classes(torch.tensor(forecast).log(), "median")
    error = (middle - bins[test]).abs().float().mean()
    print(f"{name}: ranked probability score {score:.2f}, error of the median {error:.2f} bins")

# %%
# The probability integral transform says the same in a picture: the place of the true number among the quantiles of its
# forecast. High ends say that the forecast is too sure. It is flat where the forecast is calibrated.

levels = np.arange(0.5, 40) / 40
centres = ((edges[1:] + edges[:-1]) / 2).numpy()
figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
for axis, (name, forecast) in zip(axes, (("as trained", narrow[test]), ("calibrated", corrected)), strict=True):
    below = forecast.cumsum(1)[:, :-1, None] < levels
    plot_pit(y[test], centres[below.sum(1)], ax=axis)
    axis.set_title(f"Power 1, {name}")
