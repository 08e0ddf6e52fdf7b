"""Entropic barycenters of histograms, plain and debiased."""
