"""Whose Hessian is largest, at the start and after training?"""
