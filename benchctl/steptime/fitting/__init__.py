"""From observed steps to coefficients: design, least squares, fit, diagnostics and calibration."""
