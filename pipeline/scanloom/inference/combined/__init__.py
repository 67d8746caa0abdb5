"""Predictors that run several networks: models of parts, rough models, ensembles."""
