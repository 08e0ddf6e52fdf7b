"""
Outliers, and a price for mass that stays
=========================================

Transport that keeps all mass has to move outliers too, and they dominate a squared distance. A price for mass that
appears or vanishes, `marginal_penalty`, lets the plan leave out what is too far.
"""

import matplotlib.pyplot as plt
import torch

from otloss import cloud_loss, solve
from otloss.costs import PointCost

torch.manual_seed(0)
x = torch.randn(60, 2) * 0.4
y = torch.cat([torch.randn(54, 2) * 0.4 + torch.tensor([2.0, 0.0]), torch.rand(6, 2) * 2 + torch.tensor([6.0, 3.0])])

# %%
# A tenth of the points of y are far away. The price is in the unit of the cost, a squared distance. It is soft: a lower
# price leaves more mass where it is, and begins with what is farthest away.

cost = PointCost(x, y)
plans = {
    "all mass moves": solve(None, None, cost, epsilon=0.05).plan(),
    "penalty 20": solve(None, None, cost, epsilon=0.05, marginal_penalty=20.0).plan(),
    "penalty 5": solve(None, None, cost, epsilon=0.05, marginal_penalty=5.0).plan(),
}
figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained", sharex=True, sharey=True)
for axis, (name, plan) in zip(axes, plans.items(), strict=True):
    for i, j in (plan > 0.05 * plan.max()).nonzero().tolist():
        axis.plot(*zip(x[i].tolist(), y[j].tolist(), strict=True), color="0.8", lw=0.7, zorder=0)
    axis.scatter(*x.T, s=12, label="x")
    axis.scatter(*y.T, s=6 + 900 * plan.sum(0), label="y, by mass that arrives")
    axis.set(title=f"{name}: {plan[:, 54:].sum():.1%} goes to outliers", aspect="equal")
    print(f"{name}: moved {plan.sum():.3f}, of it to outliers {plan[:, 54:].sum():.4f}")
axes[0].legend(frameon=False, loc="upper left")

# %%
# The same in a loss. A cloud that is fitted to y with all its mass sends a tenth of its points to the outliers; with
# the penalty it fits the rest.

fitted = {}
for name, penalty in {"all mass moves": None, "penalty 1": 1.0}.items():
    points = x.clone().requires_grad_()
    optimizer = torch.optim.Adam([points], lr=0.1)
    for _ in range(120):
        loss = cloud_loss(points, y, epsilon=0.1, marginal_penalty=penalty)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    fitted[name] = points.detach()

figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharex=True, sharey=True)
for axis, (name, points) in zip(axes, fitted.items(), strict=True):
    axis.scatter(*y.T, s=14, color="0.7", label="y")
    axis.scatter(*points.T, s=8, color="C0", label="fitted")
    axis.set(title=name, aspect="equal")
axes[0].legend(frameon=False, loc="upper left")
