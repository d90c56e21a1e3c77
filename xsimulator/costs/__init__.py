"""Step costs: a profile's points as curves, and the time of a step on the stages of a lane."""
