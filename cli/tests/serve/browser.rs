//! A real browser: Chromium, driven by the WebDriver protocol (W3C), which is JSON over HTTP.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Command, Stdio},
    time::Duration,
};

use serde_json::{Value, json};

/// The driver with its address, once it listens; `None` if it ends before.
fn listening(mut driver: Child) -> Option<(Child, String)> {
    let lines = BufReader::new(driver.stdout.take().expect("piped")).lines();
    let port = lines.map(|line| line.expect("a line")).find_map(|line| {
        line.strip_prefix("ChromeDriver was started successfully on port ").map(|port| port.replace('.', ""))
    });
    if port.is_none() {
        driver.wait().expect("it has closed its output");
    }
    port.map(|port| (driver, format!("127.0.0.1:{port}")))
}

/// A browser without a window, ended with its owner.
pub struct Browser {
    driver: Child,
    address: String,
    session: String,
}

impl Browser {
    /// `None`, with a line that says so, where there is no browser.
    pub fn start() -> Option<Self> {
        let mut command = Command::new("chromedriver");
        command.arg("--port=0").stdout(Stdio::piped()).stderr(Stdio::null());
        // One ends at once where another process has its port under the other version of IP.
        let started = (0..10).find_map(|_| match command.spawn() {
            Ok(driver) => listening(driver).map(Some),
            Err(_) => Some(None),
        });
        let Some((driver, address)) = started.expect("a driver that listens") else {
            crate::skip::skipped("no chromedriver; install it with: apt-get install chromium-driver");
            return None;
        };
        let mut browser = Browser { driver, address, session: String::new() };
        let flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"];
        let wanted = json!({
            "goog:chromeOptions": { "args": flags },
            "goog:loggingPrefs": { "browser": "ALL" },
            "timeouts": { "script": 120_000 },
        });
        let session = browser.post("/session", &json!({ "capabilities": { "alwaysMatch": wanted } }));
        browser.session = format!("/session/{}", session["sessionId"].as_str().expect("a session"));
        Some(browser)
    }

    /// What the driver answers.
    fn post(&self, path: &str, body: &Value) -> Value {
        let body = body.to_string();
        let mut stream = TcpStream::connect(&self.address).expect("connected");
        stream.set_read_timeout(Some(Duration::from_secs(180))).expect("set");
        let (host, len) = (&self.address, body.len());
        write!(stream, "POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len}\r\n\r\n{body}").expect("sent");
        let mut answer = BufReader::new(stream);
        let (mut head, mut len) = (String::new(), 0);
        // The driver does not hang up: its answer is as long as its head says.
        while !head.ends_with("\r\n\r\n") {
            let from = head.len();
            assert!(answer.read_line(&mut head).expect("an answer") > 0, "{head}");
            if let Some(found) = head[from..].to_lowercase().strip_prefix("content-length:") {
                len = found.trim().parse().expect("a length");
            }
        }
        let mut body = vec![0; len];
        answer.read_exact(&mut body).expect("a body");
        let body = std::str::from_utf8(&body).expect("UTF-8");
        assert!(head.lines().next().is_some_and(|line| line.contains(" 200 ")), "{head}{body}");
        serde_json::from_str::<Value>(body).expect("JSON")["value"].take()
    }

    pub fn open(&self, url: &str) {
        self.post(&format!("{}/url", self.session), &json!({ "url": url }));
    }

    /// Waits until an expression of the page's is true. The driver ends the wait after two minutes, with an error.
    pub fn wait(&self, expression: &str) {
        let look = format!(
            "const done = arguments[0], look = () => ({expression}) ? done(true) : setTimeout(look, 20); look();"
        );
        self.post(&format!("{}/execute/async", self.session), &json!({ "script": look, "args": [] }));
    }

    /// A window of this width, as a telephone has it. Chromium's own windows are no narrower than 500 pixels.
    pub fn narrow(&self, width: u32) {
        let metrics = json!({ "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false });
        let command = json!({ "cmd": "Emulation.setDeviceMetricsOverride", "params": metrics });
        self.post(&format!("{}/goog/cdp/execute", self.session), &command);
    }

    pub fn text(&self, expression: &str) -> String {
        let script = json!({ "script": format!("return String({expression});"), "args": [] });
        let found = self.post(&format!("{}/execute/sync", self.session), &script);
        found.as_str().expect("text").to_owned()
    }

    /// Errors of scripts and of the page's policy.
    pub fn complaints(&self) -> Vec<String> {
        let log = self.post(&format!("{}/se/log", self.session), &json!({ "type": "browser" }));
        let severe = log.as_array().expect("a list").iter().filter(|entry| entry["level"] == "SEVERE");
        let said = severe.filter_map(|entry| entry["message"].as_str().map(str::to_owned));
        // A browser asks for it by itself.
        said.filter(|message| !message.contains("favicon.ico")).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The end of the session is the end of the browser; a driver that is killed would leave it behind.
        if let Ok(mut stream) = TcpStream::connect(&self.address) {
            drop(stream.set_read_timeout(Some(Duration::from_secs(60))));
            let (session, host) = (&self.session, &self.address);
            drop(write!(stream, "DELETE {session} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n"));
            drop(stream.read(&mut [0; 1]));
        }
        drop(self.driver.kill());
        drop(self.driver.wait());
    }
}

/// A table cell of the page: the row that begins with a text, and the column.
pub fn cell(row: &str, column: usize) -> String {
    let rows = "[...document.querySelectorAll('tr')]";
    format!("{rows}.find((row) => row.cells[0]?.textContent === {row:?})?.cells[{column}]?.textContent")
}
