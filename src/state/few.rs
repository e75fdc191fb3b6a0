//! A list that mostly has one element, which needs no allocation. Pure data.

/// The first element in place, the others in a vector.
#[derive(Debug)]
pub(crate) struct Few<T> {
    /// `None` only if there are no others.
    first: Option<T>,
    others: Vec<T>,
}

impl<T> Few<T> {
    #[inline]
    pub(crate) fn one(element: T) -> Self {
        Few { first: Some(element), others: Vec::new() }
    }

    #[inline]
    pub(crate) fn push(&mut self, element: T) {
        match self.first {
            None => self.first = Some(element),
            Some(_) => self.others.push(element),
        }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        usize::from(self.first.is_some()) + self.others.len()
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.first.iter().chain(&self.others)
    }

    /// Moves the elements that are `wanted` to `out`.
    pub(crate) fn extract(&mut self, wanted: impl Fn(&T) -> bool, out: &mut Vec<T>) {
        if self.iter().any(&wanted) {
            for element in std::mem::take(self) {
                if wanted(&element) { out.push(element) } else { self.push(element) }
            }
        }
    }

    /// A list of what `change` makes of each element.
    #[inline]
    pub(crate) fn map<U>(self, mut change: impl FnMut(T) -> U) -> Few<U> {
        Few { first: self.first.map(&mut change), others: self.others.into_iter().map(change).collect() }
    }
}

impl<T> Default for Few<T> {
    #[inline]
    fn default() -> Self {
        Few { first: None, others: Vec::new() }
    }
}

impl<T> Extend<T> for Few<T> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, elements: I) {
        elements.into_iter().for_each(|element| self.push(element));
    }
}

impl<T> IntoIterator for Few<T> {
    type Item = T;
    type IntoIter = std::iter::Chain<std::option::IntoIter<T>, std::vec::IntoIter<T>>;

    #[inline]
    fn into_iter(self) -> Self::IntoIter {
        self.first.into_iter().chain(self.others)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_vector(
            elements in prop::collection::vec(0u8..8, 0..6),
            more in prop::collection::vec(0u8..8, 0..3),
        ) {
            let mut few = Few::default();
            few.extend(elements.iter().copied());
            prop_assert_eq!((few.len(), few.is_empty()), (elements.len(), elements.is_empty()));
            let mut out = vec![9];
            few.extract(|element| element % 2 == 1, &mut out);
            few.extend(more.iter().copied());
            let (odd, even): (Vec<u8>, Vec<u8>) = elements.into_iter().partition(|element| element % 2 == 1);
            prop_assert_eq!(out, [vec![9], odd].concat());
            let left = few.map(|element| element + 1).into_iter().map(|element| element - 1);
            prop_assert_eq!(left.collect::<Vec<u8>>(), [even, more].concat());
        }
    }
}
