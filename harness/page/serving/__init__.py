"""Sections about serving: predictions beside observations, forecasts, replayed steps, experiments."""
