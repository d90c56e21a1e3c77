"""Re-plan: predict a running plan with observed lengths, find plans that may replace it, and decide on a change."""
