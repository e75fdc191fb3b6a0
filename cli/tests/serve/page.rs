//! The service's page in a real browser: Chromium, driven by the WebDriver protocol (W3C), which is JSON over HTTP.

use serde_json::json;

use super::*;

/// A browser without a window, ended with its owner.
struct Browser {
    driver: Child,
    address: String,
    session: String,
}

impl Browser {
    /// `None`, with a line that says so, where there is no browser.
    fn start() -> Option<Self> {
        let started = Command::new("chromedriver").arg("--port=0").stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let Ok(mut driver) = started else {
            crate::skip::skipped("no chromedriver; install it with: apt-get install chromium-driver");
            return None;
        };
        let lines = BufReader::new(driver.stdout.take().expect("piped")).lines();
        let port = lines.map(|line| line.expect("a line")).find_map(|line| {
            line.strip_prefix("ChromeDriver was started successfully on port ").map(|port| port.replace('.', ""))
        });
        let mut browser =
            Browser { driver, address: format!("127.0.0.1:{}", port.expect("its port")), session: String::new() };
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
        let body = text(&body);
        assert!(head.lines().next().is_some_and(|line| line.contains(" 200 ")), "{head}{body}");
        serde_json::from_str::<Value>(body).expect("JSON")["value"].take()
    }

    fn open(&self, url: &str) {
        self.post(&format!("{}/url", self.session), &json!({ "url": url }));
    }

    /// Waits until an expression of the page's is true. The driver ends the wait after two minutes, with an error.
    fn wait(&self, expression: &str) {
        let look = format!(
            "const done = arguments[0], look = () => ({expression}) ? done(true) : setTimeout(look, 20); look();"
        );
        self.post(&format!("{}/execute/async", self.session), &json!({ "script": look, "args": [] }));
    }

    /// A window of this width, as a telephone has it. Chromium's own windows are no narrower than 500 pixels.
    fn narrow(&self, width: u32) {
        let metrics = json!({ "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false });
        let command = json!({ "cmd": "Emulation.setDeviceMetricsOverride", "params": metrics });
        self.post(&format!("{}/goog/cdp/execute", self.session), &command);
    }

    fn text(&self, expression: &str) -> String {
        let script = json!({ "script": format!("return String({expression});"), "args": [] });
        let found = self.post(&format!("{}/execute/sync", self.session), &script);
        found.as_str().expect("text").to_owned()
    }

    /// Errors of scripts and of the page's policy.
    fn complaints(&self) -> Vec<String> {
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
fn cell(row: &str, column: usize) -> String {
    let rows = "[...document.querySelectorAll('tr')]";
    format!("{rows}.find((row) => row.cells[0]?.textContent === {row:?})?.cells[{column}]?.textContent")
}

#[test]
fn a_browser_shows_what_the_service_does_and_follows_it() {
    let Some(browser) = Browser::start() else { return };
    let mut serving = Serving::start_with(&["--http", "127.0.0.1:0"]);
    let name = "<b>model</b> \"7\"";
    let client = block_on(Client::connect(serving.socket(), ClientOptions::new(name, BLOCK_BYTES))).expect("connected");
    let pool = Arc::new(SharedMemory::new(2 * BLOCK_BYTES).expect("memory"));
    // SAFETY: nobody touches a block of it while the block is on its way.
    let lent = unsafe { kvhoist::Memory::shared(pool.clone()) };
    block_on(client.register(lent.pinned(true))).expect("registered");
    let place = |n: usize| vec![Segment { ptr: pool.as_ptr().wrapping_add(n * BLOCK_BYTES), len: BLOCK_BYTES }];
    let (keys, places) = ([BlockKey::new([1; 32]), BlockKey::new([2; 32])], [place(0), place(1)]);
    assert!(block_on(client.store_from(&keys[..1], None, &places[..1])).expect("a service")[0].is_ok());
    let loaded = block_on(client.load_into(&keys, &places)).expect("a service");
    assert!(matches!(loaded[..], [Ok(true), Ok(false)]), "{loaded:?}");

    browser.open(&format!("http://{}/", serving.http.as_ref().expect("it says where")));
    browser.wait(&format!("{} === '1'", cell("disk", 4)));
    assert_eq!(browser.text("document.querySelector('#spaces h2').textContent"), format!("Space {name}"));
    assert_eq!(browser.text("document.getElementById('state').textContent"), "serving");
    assert_eq!(browser.text(&cell("disk", 1)), "1", "resident");
    assert!(
        browser.text("document.getElementById('spaces').textContent").contains("hit ratio 0.500, 1 misses, 1 stores")
    );
    assert_eq!(browser.text(&cell("stored by clients", 1)), "64.0 KiB");
    assert_eq!(browser.text(&cell("read from the drives", 1)), "64.0 KiB");
    // How long its movements took, by route: a number, two times, and a bar for each bucket.
    let [blocks, p99] = [1, 3].map(|column| browser.text(&cell("region_to_disk", column)));
    assert!(blocks == "1" && [" us", " ms", " s"].iter().any(|unit| p99.ends_with(unit)), "{blocks} {p99}");
    let heights = "[...document.querySelector('.bars').children].map((bar) => bar.style.height)";
    assert_eq!(browser.text(&format!("{heights}.length")), "24");
    assert_eq!(browser.text(&format!("{heights}.filter((height) => height === '100%').length")), "1");
    let store = serving.store.path().display().to_string();
    assert!(!browser.text(&cell(&store, 2)).is_empty(), "what is known of the wear of the drive");
    let (row, pid) = (cell(name, 1), std::process::id().to_string());
    assert_eq!((browser.text(&row), browser.text(&cell(name, 4))), (pid, "128.0 KiB".into()), "the client");

    // It follows: without a reload the next figures appear, with rates and a line through them.
    let loads = 3;
    for _ in 0..loads {
        assert!(block_on(client.load_into(&keys[..1], &places[..1])).expect("a service")[0].is_ok());
    }
    browser.wait(&format!("{} === '{}'", cell("disk", 4), loads + 1));
    browser.wait("document.querySelector('#spaces polyline').getAttribute('points').split(' ').length > 1");
    // Axes: a round number that no point is above, its half, 0; and the time.
    let labels = |chart: usize, side: &str| {
        let spans = format!("document.querySelectorAll('.chart')[{chart}].querySelectorAll('.{side} span')");
        browser.text(&format!("[...{spans}].map((span) => span.textContent).join(', ')"))
    };
    let (hits, read) = (labels(0, "values"), labels(1, "values"));
    assert!(["1, 0.5, 0", "2, 1, 0", "5, 2.5, 0"].contains(&hits.as_str()), "{hits}");
    assert!(read.ends_with(", 0 B/s") && read.starts_with(['1', '2', '5']), "{read}");
    assert_eq!(labels(0, "times"), "5 minutes ago, 2.5, now");
    // On a telephone the page is as wide as the window: tables scroll in their places, and no number is broken.
    browser.narrow(420);
    browser.wait("window.innerWidth === 420");
    assert_eq!(browser.text("document.documentElement.scrollWidth - document.documentElement.clientWidth"), "0");
    let broken = "[...document.querySelectorAll('td:not(:first-child)')].filter((cell) => { \
                  const text = document.createRange(); text.selectNodeContents(cell); \
                  return text.getBoundingClientRect().height > 32; }).length";
    assert_eq!(browser.text(broken), "0", "cells of more than one line");
    assert_eq!(browser.complaints(), Vec::<String>::new());

    serving.signal();
    assert!(serving.child.wait().expect("an end").success());
    browser.wait("document.getElementById('state').className === 'bad'");
    assert!(browser.text("document.getElementById('state').textContent").starts_with("the service does not answer"));
}
