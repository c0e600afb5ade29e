"""What tests of several areas share: real services, fakes, fixtures."""
