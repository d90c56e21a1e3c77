"""Turn plans into the one `Recommendation` that every output renders."""
