//! What a measurement of a route found.

use crate::measure::{Sample, Series, ratio, table};

/// What a route gave: the bare loop first, the cache second, others after them.
pub struct Report {
    /// Route, place, size and depth.
    pub title: String,
    /// Each contender's rounds.
    pub series: Vec<Series>,
    /// Record pages written per block stored, where blocks were stored.
    pub record_writes: Option<f64>,
    /// The share of the cache's blocks that came from disk, as its routes count, where blocks were read.
    pub from_disk: Option<f64>,
}

impl Report {
    /// Throughput of the cache over the bare loop's: the median over rounds.
    pub fn over_bare(&self) -> f64 {
        ratio(&self.series[1], &self.series[0], Sample::mib_per_s)
    }

    /// The table as text.
    pub fn text(&self) -> String {
        let mut text = table(&self.title, &self.series);
        text += &format!("throughput of the bare loop: {:.3}; all blocks verified\n", self.over_bare());
        if let Some(peer) = self.series.iter().find(|series| series.name.starts_with("pread + checksum")) {
            let over = ratio(&self.series[1], peer, Sample::mib_per_s);
            text += &format!("throughput of pread + checksum in the caller: {over:.3}\n");
        }
        if let Some(pages) = self.record_writes {
            text += &format!("record pages written per block stored: {pages:.3}\n");
        }
        text
    }
}
