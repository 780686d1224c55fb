"""The trainer under the name that MM-GRPO's users import."""
