"""Scripts that compare kvoffload with other stacks on what all of them do."""
