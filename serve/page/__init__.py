"""The chat page: plain HTML, CSS and JavaScript modules, served by kvarn.serve.http.page."""
