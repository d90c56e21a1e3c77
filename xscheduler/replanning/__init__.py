"""Re-planning: predict a running plan under other lengths, find plans that may replace it, and decide on a change."""
