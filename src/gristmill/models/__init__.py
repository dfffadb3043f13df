"""Loads and runs models: functions, text encoders, feature models. Heavy packages are imported where they are used."""
