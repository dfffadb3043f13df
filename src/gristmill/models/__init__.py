"""Models made live: functions, text encoders and feature models. Heavy packages are imported where they are used."""
