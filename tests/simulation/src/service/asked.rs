//! Calls that the model is asked about.

use std::rc::Rc;

use super::run::Run;
use crate::model::{Began, StoreEnd};

/// Blocks of a call, and what was so when it began.
pub struct Asked {
    pub run: Rc<Run>,
    pub space: usize,
    pub life: u32,
    pub began: Vec<Began>,
    pub stores: bool,
}

impl Asked {
    /// The service that the call was made to still runs.
    fn is_current(&self) -> bool {
        self.run.life.get() == self.life
    }

    /// A block was found, or not.
    pub fn found(&self, at: usize, found: bool) {
        let mut report = self.run.report.borrow_mut();
        *if found { &mut report.hits } else { &mut report.misses } += 1;
        if !self.is_current() {
            return;
        }
        let (began, claims) = (self.began[at], self.run.claims(self.space));
        let answered = self.run.models[self.space].borrow().answered(began, found, claims);
        self.run.check(answered.map_err(|what| format!("space {}: {what}", self.space)));
        report.hits_promised += u64::from(found && began.must_hit && claims.keeps);
        report.misses_promised += u64::from(!found && began.must_miss);
    }

    /// The stores have ended.
    pub fn stored(mut self, ends: impl Fn(usize) -> StoreEnd) {
        for (at, began) in std::mem::take(&mut self.began).into_iter().enumerate() {
            if self.is_current() {
                self.run.models[self.space].borrow_mut().store_ends(began, ends(at));
            }
        }
    }
}

impl Drop for Asked {
    /// A store without an answer may still be made, for as long as the service runs.
    fn drop(&mut self) {
        if self.stores && self.is_current() {
            let mut model = self.run.models[self.space].borrow_mut();
            self.began.drain(..).for_each(|began| model.store_ends(began, StoreEnd::GoesOn));
        }
    }
}
