"""One file for each defect of torch that a trace works around."""
