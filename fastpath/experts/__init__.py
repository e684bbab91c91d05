"""Mixture of experts: choice of experts, products of rows that share an expert, and the sum of what they return."""
