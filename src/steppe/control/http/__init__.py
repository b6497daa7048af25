"""REST, WebSocket and the page: authentication, middleware, streams, the server."""
