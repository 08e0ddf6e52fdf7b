"""Assignments of items, of random samples, and of the points of two clouds."""
