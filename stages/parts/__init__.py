"""What one stage is made of where it would not fit into its file; what two stages share stands in stages/core."""
