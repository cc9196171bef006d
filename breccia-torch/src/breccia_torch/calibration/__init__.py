"""Calibration: codes and scales chosen by the inputs that layers have on a text, for any recipe."""
