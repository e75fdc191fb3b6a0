//! The node's service in this process, for `python -m kvhoist serve`.

use std::path::PathBuf;

use kvhoist::service::{Server, ServerConfig, Share};
use pyo3::{prelude::*, types::PyDict};

use crate::{errors, options};

/// A running service.
#[pyclass(frozen, module = "kvhoist._native", name = "Server")]
pub struct PyServer {
    server: Server,
}

#[pymethods]
impl PyServer {
    /// Starts to listen. `settings` are settings of the engine, for every space.
    #[new]
    #[pyo3(signature = (
        socket, paths, settings, *, capacity_bytes, host_bytes, shares, linger_ms, pin, move_host, uids, socket_group
    ))]
    #[expect(clippy::too_many_arguments, reason = "each is an argument of `python -m kvhoist serve`")]
    fn start(
        py: Python<'_>,
        socket: PathBuf,
        paths: Vec<PathBuf>,
        settings: &Bound<'_, PyDict>,
        capacity_bytes: u64,
        host_bytes: u64,
        shares: Vec<String>,
        linger_ms: Option<u64>,
        pin: bool,
        move_host: bool,
        uids: Vec<u32>,
        socket_group: Option<String>,
    ) -> PyResult<Self> {
        let mut config = ServerConfig::new(socket);
        config.paths = paths;
        config.capacity_bytes = capacity_bytes;
        config.host_bytes = host_bytes;
        let share =
            |text: String| text.parse::<Share>().map_err(|_| errors::config(py, "shares", &text, Share::EXPECTED));
        config.shares = shares.into_iter().map(share).collect::<PyResult<_>>()?;
        config.linger_ms = linger_ms;
        config.pin = pin;
        config.move_host = move_host;
        config.uids = uids;
        config.socket_group = socket_group;
        config.cache = options::config(py, settings)?;
        let server = py.detach(|| Server::start(config)).map_err(|error| errors::to_python(py, &error))?;
        Ok(PyServer { server })
    }

    /// Takes no more work; `wait` returns when all requests are answered.
    fn drain(&self) {
        self.server.drain();
    }

    /// Waits for its end, whatever signals come.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.server.wait()).map_err(|error| errors::to_python(py, &error))
    }
}
