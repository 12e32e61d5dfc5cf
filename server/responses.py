"""stub"""

ROUTES = ()
