"""Re-planning: what a running plan does under other lengths, which plans may take over, and whether one should."""
