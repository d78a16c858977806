"""Modules that gather their parameters, run, and reduce their gradients."""
