//! The engine's messages, on their way to Python's `logging`.
//!
//! The engine writes them on whatever thread it is, its reactor above all, which must not wait for the interpreter's
//! lock or for a handler of `logging`: they go into a bounded queue, which a thread of Python's empties
//! (`kvhoist/_logs.py`). Messages that do not fit are counted.

use std::{
    collections::VecDeque,
    fmt::{self, Write},
    ptr,
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicPtr, Ordering},
    },
};

use pyo3::prelude::*;
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    level_filters::LevelFilter,
    span,
    subscriber::Interest,
};

/// Messages that wait for `logging`.
const MESSAGES_MAX: usize = 256;

/// Characters of one message.
const MESSAGE_CHARS_MAX: usize = 4096;

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    messages: VecDeque<Message>,
    /// Those that found no room since the last were taken.
    lost: u64,
    ended: bool,
}

struct Message {
    level: Level,
    /// The module that it is of.
    target: &'static str,
    text: String,
}

/// A message as Python gets it.
type Taken = (u8, &'static str, String);

/// This process's queue; a forked child gets another. Never freed: threads may have it in their hands.
static QUEUE: AtomicPtr<Queue> = AtomicPtr::new(ptr::null_mut());

impl Queue {
    fn current() -> Option<&'static Queue> {
        // SAFETY: null or a leaked box.
        unsafe { QUEUE.load(Ordering::Acquire).as_ref() }
    }

    fn renew() {
        QUEUE.store(Box::into_raw(Box::default()), Ordering::Release);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics under it")
    }

    fn push(&self, message: Message) {
        let mut state = self.state();
        if state.messages.len() < MESSAGES_MAX {
            state.messages.push_back(message);
        } else {
            state.lost += 1;
        }
        drop(state);
        self.changed.notify_one();
    }
}

/// Has the engine's messages go into the queue from now on.
pub fn subscribe() {
    if Queue::current().is_none() {
        Queue::renew();
    }
    // Fails if it was done before: the module is imported once more.
    let _ = tracing::subscriber::set_global_default(ToQueue);
}

/// Waits for messages: a list of (level of `logging`, module, text), and how many were lost since the last call. `None`
/// after `logs_end`, when all were taken.
#[pyfunction]
#[pyo3(name = "_logs_take")]
pub fn logs_take(py: Python<'_>) -> Option<(Vec<Taken>, u64)> {
    let taken = py.detach(|| {
        let queue = Queue::current()?;
        let idle = |state: &mut State| state.messages.is_empty() && state.lost == 0 && !state.ended;
        let mut state = queue.changed.wait_while(queue.state(), idle).expect("nothing panics under it");
        let (messages, lost) = (std::mem::take(&mut state.messages), std::mem::take(&mut state.lost));
        (!messages.is_empty() || lost > 0).then_some((messages, lost))
    });
    let (messages, lost) = taken?;
    let taken = |message: Message| (level(message.level), message.target, message.text);
    Some((messages.into_iter().map(taken).collect(), lost))
}

/// Has `logs_take` return `None` when the queue is empty.
#[pyfunction]
#[pyo3(name = "_logs_end")]
pub fn logs_end() {
    if let Some(queue) = Queue::current() {
        queue.state().ended = true;
        queue.changed.notify_all();
    }
}

/// Gives a forked child a queue of its own: one of the parent's threads may have had the parent's locked.
#[pyfunction]
#[pyo3(name = "_logs_renew")]
pub fn logs_renew() {
    Queue::renew();
}

/// The number that `logging` has for a level.
fn level(level: Level) -> u8 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        _ => 10,
    }
}

/// Spans are not recorded: the engine has none.
struct ToQueue;

impl Subscriber for ToQueue {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.enabled(metadata) { Interest::always() } else { Interest::never() }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::DEBUG)
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::DEBUG && metadata.target().starts_with("kvhoist")
    }

    fn new_span(&self, _span: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _span: &span::Id, _values: &span::Record<'_>) {}

    fn record_follows_from(&self, _span: &span::Id, _follows: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let Some(queue) = Queue::current() else { return };
        let mut line = Line::default();
        event.record(&mut line);
        let text = printable(&(line.message + &line.fields));
        let metadata = event.metadata();
        queue.push(Message { level: *metadata.level(), target: metadata.target(), text });
    }

    fn enter(&self, _span: &span::Id) {}

    fn exit(&self, _span: &span::Id) {}
}

/// `message; name: value; ...`.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a String does not fail; a value's own failure leaves it out.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, "; {name}: {value:?}"),
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}

/// Paths and names of files may have anything in them, terminals' control sequences too.
fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars().take(MESSAGE_CHARS_MAX) {
        if character.is_control() {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    shown
}
