"""
Move one cloud of points onto another
=====================================

`cloud_loss` is a distance between two clouds that a gradient step can lower: zero if they are equal, and aware of how
far points are apart. The plan of `solve` says which point goes where.
"""

import matplotlib.pyplot as plt
import torch

from otloss import cloud_loss, solve
from otloss.costs import PointCost

torch.manual_seed(0)
start = torch.randn(150, 2)
angle = 2 * torch.pi * torch.rand(120)
goal = torch.stack([4 + angle.cos(), 1 + angle.sin()], 1) + 0.05 * torch.randn(120, 2)  # a ring

# %%
# Gradient steps on the positions. The clouds have 150 and 120 points: no point needs a partner. `blur` is a length,
# below which the loss does not tell points apart.

x = start.clone().requires_grad_()
optimizer = torch.optim.Adam([x], lr=0.15, betas=(0.5, 0.9))
frames, losses = {0: start}, []
for step in range(1, 61):
    loss = cloud_loss(x, goal, blur=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step in (10, 25, 60):
        frames[step] = x.detach().clone()
        print(f"step {step}: loss {loss.item():.2g}")

figure, axes = plt.subplots(1, 4, figsize=(12, 3), layout="constrained", sharex=True, sharey=True)
for axis, (step, points) in zip(axes, frames.items(), strict=True):
    axis.scatter(*goal.T, s=8, color="0.7", label="goal")
    axis.scatter(*points.T, s=8, color="C0", label="moving")
    axis.set(title=f"after {step} steps", aspect="equal")
axes[0].legend(frameon=False)

# %%
# Without steps: the plan of entropic transport, and the mean of where each point goes. The answer says how accurate it
# is: `gap` bounds the difference to the optimum.

answer = solve(None, None, PointCost(start, goal), epsilon=0.05)
target = answer.barycentric_map(goal)
print(f"value {answer.value:.4f}, converged {bool(answer.converged)}, gap {answer.gap:.1e}")

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained", width_ratios=[1.4, 1])
left.quiver(*start.T, *(target - start).T, angles="xy", scale_units="xy", scale=1, width=0.002, color="C0")
left.scatter(*goal.T, s=8, color="0.5")
left.set(title="Where each point goes", aspect="equal")
right.semilogy(range(1, 61), losses)
right.set(title="The loss over the steps", xlabel="steps", ylabel="loss")
