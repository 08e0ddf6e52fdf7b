"""
Give a photograph the colours of another
========================================

The pixels of a photograph are a cloud of points in the space of colours. A transport map moves it onto the cloud of
another photograph, and changes colours as little as it can. Both photographs come with scikit-learn.
"""

import matplotlib.pyplot as plt
from sklearn.datasets import load_sample_image
from sklearn.utils import resample

from otloss.estimators import TransportAdapter

china, flower = (load_sample_image(name)[::3, ::3] / 255 for name in ("china.jpg", "flower.jpg"))
x, y = (resample(image.reshape(-1, 3), n_samples=800, replace=False, random_state=0) for image in (china, flower))

# %%
# A plan between 800 pixels of each photograph is enough. The linear map moves means and covariances onto each other.
# The entropic map follows the cloud more closely; `epsilon` is a squared distance of colours, and makes it smooth.

maps = {
    "linear map": TransportAdapter().fit(x, target=y),
    "entropic map": TransportAdapter("barycentric", epsilon=0.03).fit(x, target=y),
}
moved = {name: one.transform(china.reshape(-1, 3)).clip(0, 1).reshape(china.shape) for name, one in maps.items()}

figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
for axis, (name, image) in zip(axes.flat, {"photograph": china, "colours": flower, **moved}.items(), strict=True):
    axis.imshow(image)
    axis.set_title(name)
    axis.axis("off")

# %%
# The clouds themselves: red and blue of each pixel, before and after.

clouds = {"photograph": x, "colours": y, **{name: one.transform(x).clip(0, 1) for name, one in maps.items()}}
figure, axes = plt.subplots(1, 4, figsize=(12, 3.6), layout="constrained", sharex=True, sharey=True)
for axis, (name, colours) in zip(axes, clouds.items(), strict=True):
    axis.scatter(colours[:, 0], colours[:, 2], s=8, c=colours)
    axis.set(title=name, xlabel="red", aspect="equal")
axes[0].set_ylabel("blue")
