"""GSM8K: grade-school word problems, graded by the number after ####."""
