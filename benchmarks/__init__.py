"""Copy paths side by side: what a machine gives, and how much of it each path takes."""
