//! A load that completes layer by layer in another process, which reports it part by part.

use std::sync::{Arc, Mutex, PoisonError};

use super::progress::LayerProgress;
use crate::error::{Error, Result};

/// What the other process has reported of a load. Each part has some of the blocks, in order.
///
/// A part whose end is reported, or whose process is gone, completes all of its layers.
pub struct LayerReports {
    progress: Arc<LayerProgress>,
    parts: Mutex<Vec<Part>>,
}

struct Part {
    count: usize,
    /// By layer: the leading blocks that are in place, and whether the next one failed.
    layers: Vec<Option<(usize, bool)>>,
    blocks: Option<Vec<Result<bool>>>,
}

impl LayerReports {
    /// Of a load of as many layers, in parts of so many blocks.
    pub(crate) fn new(layers: usize, counts: &[usize]) -> (Arc<LayerProgress>, Arc<Self>) {
        let progress = LayerProgress::new(layers, counts.iter().sum());
        let part = |&count| Part { count, layers: vec![None; layers], blocks: None };
        let parts = Mutex::new(counts.iter().map(part).collect());
        let reports = LayerReports { progress: Arc::clone(&progress), parts };
        if counts.is_empty() {
            (0..layers).for_each(|layer| reports.progress.complete(layer, (0, None)));
            reports.progress.end(Vec::new());
        }
        (progress, Arc::new(reports))
    }

    /// What a layer of a part came to: the leading blocks in place, and whether the next one failed. What was reported
    /// before, or of a layer that there is not, changes nothing.
    pub fn layer(&self, part: usize, layer: usize, leading: usize, failed: bool) {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let Part { count, layers, .. } = &mut parts[part];
        let count = *count;
        match layers.get_mut(layer) {
            Some(report @ None) => *report = Some((leading.min(count), failed)),
            _ => return,
        }
        let Some(done) = of_all(&parts, layer) else { return };
        drop(parts);
        self.progress.complete(layer, done);
    }

    /// The end of a part, with the result of each of its blocks. Again: changes nothing.
    pub fn end(&self, part: usize, results: Result<Vec<Result<bool>>>) {
        let (count, layers) = {
            let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
            let Part { count, layers, blocks } = &mut parts[part];
            if blocks.is_some() {
                return;
            }
            let results = match results {
                Ok(results) if results.len() == *count => results,
                Ok(results) => {
                    let text = format!("found {} results, expected one for each of {count} blocks", results.len());
                    vec![Err(Error::service(crate::ServiceFault::Protocol, text)); *count]
                }
                Err(error) => vec![Err(error); *count],
            };
            *blocks = Some(results);
            (*count, layers.len())
        };
        // What is not reported by now never is.
        (0..layers).for_each(|layer| self.layer(part, layer, 0, count > 0));
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        if parts.iter().all(|part| part.blocks.is_some()) {
            let blocks = parts.iter_mut().flat_map(|part| part.blocks.clone().expect("just looked at")).collect();
            drop(parts);
            self.progress.end(blocks);
        }
    }
}

/// What a layer came to, once all parts have reported it.
fn of_all(parts: &[Part], layer: usize) -> Option<(usize, Option<Error>)> {
    let mut leading = 0;
    let mut cut = None;
    for part in parts {
        let (in_place, failed) = part.layers[layer]?;
        if cut.is_none() {
            leading += in_place;
            if in_place < part.count {
                cut = Some(failed);
            }
        }
    }
    let error = || {
        let text = "a block could not be loaded; the result of each block, at the end of the load, says why";
        Error::service(crate::ServiceFault::Io, text)
    };
    Some((leading, cut.unwrap_or(false).then(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_complete_when_all_parts_have_reported_it() {
        let (progress, reports) = LayerReports::new(2, &[3, 2]);
        reports.layer(0, 0, 3, false);
        assert!(progress.layer(0).is_none(), "the second part has not reported it");
        reports.layer(1, 0, 1, true);
        let (leading, error) = progress.layer(0).expect("reported");
        assert!(leading == 4 && error.is_some(), "{leading}");
        // Reported again, out of range, or more than there are.
        reports.layer(1, 0, 2, false);
        reports.layer(0, 7, 3, false);
        reports.layer(1, 1, 900, false);
        reports.end(0, Ok(vec![Ok(true); 3]));
        assert_eq!(progress.layer(1).expect("ended").0, 0, "a layer that was never reported is not there");
        assert!(progress.blocks().is_none());
        reports.end(1, Ok(vec![Ok(true), Err(Error::Closed)]));
        reports.end(1, Err(Error::Closed));
        let blocks = progress.blocks().expect("ended");
        assert!(blocks[..4].iter().all(|block| matches!(block, Ok(true))) && blocks[4].is_err());
    }

    #[test]
    fn a_part_that_is_lost_completes_its_layers_with_its_error() {
        let (progress, reports) = LayerReports::new(2, &[2]);
        reports.layer(0, 0, 2, false);
        reports.end(0, Err(Error::Closed));
        assert_eq!(progress.layer(0).expect("reported").0, 2);
        assert!(matches!(progress.layer(1).expect("lost"), (0, Some(_))));
        assert!(progress.blocks().expect("lost").iter().all(|block| matches!(block, Err(Error::Closed))));
        // As many results as blocks, or none.
        let (progress, reports) = LayerReports::new(1, &[2]);
        reports.end(0, Ok(vec![Ok(true)]));
        assert!(progress.blocks().expect("ended").iter().all(Result::is_err));
        assert!(LayerReports::new(1, &[]).0.blocks().expect("of no blocks").is_empty());
    }
}
