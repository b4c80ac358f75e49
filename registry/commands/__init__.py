"""The commands behind `weightledger`, and how they show what they found."""
