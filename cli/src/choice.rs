//! Settings that are one of a few choices, as flags: the words are those of settings.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use kvhoist::{DirectIo, Eviction, StorageKind, WritePolicy};
use serde::{Serialize, de::DeserializeOwned};

/// A setting of a few choices.
pub trait Choice: Serialize + DeserializeOwned + Clone + Send + Sync + 'static {
    const ALL: &[Self];
}

macro_rules! choices {
    ($($type:ident)*) => {
        $(impl Choice for $type {
            const ALL: &[Self] = $type::ALL;
        })*
    };
}

choices! { DirectIo Eviction StorageKind WritePolicy }

/// The word of a choice.
pub fn word<T: Choice>(choice: &T) -> String {
    let value = serde_json::to_value(choice).expect("a word");
    value.as_str().expect("a word").to_owned()
}

/// Reads the word of a choice; also with `-` for `_`.
pub fn choice<T: Choice>() -> impl TypedValueParser<Value = T> {
    one_of(T::ALL)
}

/// As [`choice`], of some of them.
pub fn one_of<T: Choice>(choices: &'static [T]) -> impl TypedValueParser<Value = T> {
    let known = |choice: &T| {
        let name = word(choice);
        let hyphens = name.replace('_', "-");
        let value = PossibleValue::new(name.clone());
        if hyphens == name { value } else { value.alias(hyphens) }
    };
    PossibleValuesParser::new(choices.iter().map(known))
        .map(|word| serde_json::from_value(word.replace('-', "_").into()).expect("one of the words"))
}
