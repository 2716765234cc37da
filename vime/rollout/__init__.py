"""Rollout functions: how groups of prompts become groups of scored samples."""
