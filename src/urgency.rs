//! How urgent an operation is, and the line in which operations of one kind wait.

use std::collections::{BTreeMap, VecDeque};

/// How urgent the next step of a movement is, or a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Urgency {
    Awaited,
    /// No waiter. The number of its flight, which finds it when a waiter joins.
    Background(u64),
}

/// Operations of one kind that wait: awaited ones first, in the order in which they came or were raised; then the
/// others, by the number of their flight.
pub(crate) struct Line<T> {
    awaited: VecDeque<T>,
    background: BTreeMap<u64, T>,
}

impl<T> Default for Line<T> {
    fn default() -> Self {
        Line { awaited: VecDeque::new(), background: BTreeMap::new() }
    }
}

impl<T> Line<T> {
    pub(crate) fn push(&mut self, urgency: Urgency, operation: T) {
        match urgency {
            Urgency::Awaited => self.awaited.push_back(operation),
            // A movement takes one step at a time; of two steps, the second would wait for the first.
            Urgency::Background(number) => self.awaited.extend(self.background.insert(number, operation)),
        }
    }

    /// Drops the operations that are not to be kept.
    pub(crate) fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        self.awaited.retain(&keep);
        self.background.retain(|_, operation| keep(operation));
    }

    /// Takes the most urgent operation.
    pub(crate) fn pop(&mut self) -> Option<(Urgency, T)> {
        self.pop_awaited().or_else(|| {
            let (number, operation) = self.background.pop_first()?;
            Some((Urgency::Background(number), operation))
        })
    }

    /// Takes the first awaited operation.
    pub(crate) fn pop_awaited(&mut self) -> Option<(Urgency, T)> {
        self.awaited.pop_front().map(|operation| (Urgency::Awaited, operation))
    }

    /// The most urgent operation.
    pub(crate) fn first(&self) -> Option<&T> {
        self.awaited.front().or_else(|| self.background.values().next())
    }

    pub(crate) fn len(&self) -> usize {
        self.awaited.len() + self.background.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn has_awaited(&self) -> bool {
        !self.awaited.is_empty()
    }

    /// True where a new operation would be first.
    pub(crate) fn would_be_first(&self, urgency: Urgency) -> bool {
        self.awaited.is_empty() && (urgency == Urgency::Awaited || self.background.is_empty())
    }

    /// The operations of these flights are awaited from now on; with `all`, every operation is.
    pub(crate) fn raise(&mut self, flights: &[u64], all: bool) {
        if all {
            self.awaited.extend(std::mem::take(&mut self.background).into_values());
        }
        self.awaited.extend(flights.iter().filter_map(|number| self.background.remove(number)));
    }

    /// All operations, the most urgent first.
    #[cfg(feature = "sim")]
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.awaited.iter().chain(self.background.values())
    }
}

#[cfg(test)]
mod tests {
    use super::{Urgency::*, *};

    #[test]
    fn awaited_operations_go_first_and_raised_ones_with_them() {
        let mut line = Line::default();
        for (urgency, name) in [(Background(3), 'a'), (Awaited, 'b'), (Background(1), 'c'), (Background(2), 'd')] {
            assert_eq!(line.would_be_first(urgency), name == 'a' || name == 'b');
            line.push(urgency, name);
        }
        line.raise(&[3, 9], false);
        line.push(Awaited, 'e');
        assert!(line.has_awaited() && line.first() == Some(&'b') && line.len() == 5);
        let order: Vec<_> = std::iter::from_fn(|| line.pop()).collect();
        let expected = [(Awaited, 'b'), (Awaited, 'a'), (Awaited, 'e'), (Background(1), 'c'), (Background(2), 'd')];
        assert_eq!(order, expected);
        line.push(Background(1), 'f');
        assert!(line.pop_awaited().is_none(), "nobody awaits it");
        line.raise(&[], true);
        assert_eq!(line.pop_awaited(), Some((Awaited, 'f')));
        assert!(line.is_empty());
    }
}
