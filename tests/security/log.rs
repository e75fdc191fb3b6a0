//! Everything that is logged, at any level, as text.

use std::{
    fmt::{self, Write},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
};

static TEXT: Mutex<String> = Mutex::new(String::new());

/// A subscriber that wants everything and keeps it.
struct Everything;

/// Keeps all that any thread of this process logs from now on. Once a process.
pub fn keep() {
    tracing::subscriber::set_global_default(Everything).expect("nothing else in this process subscribes");
}

/// All of it so far.
pub fn text() -> String {
    TEXT.lock().expect("not poisoned").clone()
}

struct Fields<'a>(&'a mut String);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        write!(self.0, " {field}={value:?}").expect("a string takes all");
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        write!(self.0, " {field}={value}").expect("a string takes all");
    }
}

impl Subscriber for Everything {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let mut text = TEXT.lock().expect("not poisoned");
        text.push_str(span.metadata().name());
        span.record(&mut Fields(&mut text));
        text.push('\n');
        Id::from_u64(LAST.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn record(&self, _: &Id, values: &Record<'_>) {
        let mut text = TEXT.lock().expect("not poisoned");
        values.record(&mut Fields(&mut text));
        text.push('\n');
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = TEXT.lock().expect("not poisoned");
        write!(text, "{} {}", event.metadata().level(), event.metadata().target()).expect("a string takes all");
        event.record(&mut Fields(&mut text));
        text.push('\n');
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
