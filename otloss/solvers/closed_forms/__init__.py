"""Transport with a closed form: on the line, on the circle, on a tree, and sliced."""
