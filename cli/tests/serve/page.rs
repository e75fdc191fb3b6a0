//! The service's page in a real browser.

use super::*;
use crate::browser::{Browser, cell};

/// Whether these are a round number, its half, and 0.
fn is_axis(values: &str) -> bool {
    let numbers: Vec<f64> = values.split(", ").map(|text| text.parse().expect("a number")).collect();
    matches!(numbers[..], [top, half, 0.0] if top > 0.0 && (half - top / 2.0).abs() < top / 100.0)
        && values.trim_start_matches(['0', '.']).starts_with(['1', '2', '5'])
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
    assert!(is_axis(&hits), "{hits}");
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
