"""What tests of the bridge use, and tests of those who build on it."""
