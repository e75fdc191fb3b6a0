//! Tables of what is on the wire: each makes the writer and the reader of a struct, or of an enum of messages.
//!
//! A field is named by errors as it is here. `<= n`: a text of at most n bytes. `as u16`: a flag of two bytes.

/// The fields of a struct in the order of the wire.
macro_rules! fields {
    ($type:ident { $($field:ident $(<= $max:ident)?),* }) => {
        impl Wire for $type {
            fn put(&self, writer: &mut Writer) {
                $(put!(writer, &self.$field $(, $max)?);)*
            }

            fn get(reader: &mut Reader<'_>, _: &'static str) -> Result<Self, Malformed> {
                Ok($type { $($field: get!(reader, $field $(, $max)?),)* })
            }
        }
    };
}

/// The kinds of an enum's messages, and the fields of each.
macro_rules! messages {
    ($type:ident ($what:literal, $expected:literal) {
        $($kind:literal => $name:ident
            $({ $($field:ident $(<= $max:ident)? $(as $wide:ident)?),* })?
            $(($body:ident))?,)*
    }) => {
        impl $type {
            /// The whole frame.
            pub fn encode(&self, id: u64) -> Vec<u8> {
                let mut writer = Writer::frame(id);
                let kind = match self {
                    $($type::$name $({ $($field),* })? $(($body))? => {
                        $($(put!(&mut writer, $field $(, $max)? $(, as $wide)?);)*)?
                        $($body.put(&mut writer);)?
                        $kind
                    })*
                };
                writer.finish(kind)
            }

            /// Reads the body of a frame of `kind`.
            ///
            /// # Errors
            /// [`Malformed`] for other messages, and past every limit.
            pub fn decode(kind: u16, body: &[u8]) -> Result<Self, Malformed> {
                let mut reader = Reader::new(body);
                let message = match kind {
                    $($kind => $type::$name
                        $({ $($field: get!(&mut reader, $field $(, $max)? $(, as $wide)?)),* })?
                        $((get!(&mut reader, $body)))?,)*
                    other => return Err(malformed($what, other, $expected)),
                };
                reader.end()?;
                Ok(message)
            }
        }
    };
}

macro_rules! put {
    ($writer:expr, $value:expr) => {
        Wire::put($value, $writer)
    };
    ($writer:expr, $value:expr, as $wide:ident) => {
        Wire::put(&$wide::from(*$value), $writer)
    };
    ($writer:expr, $value:expr, $max:ident) => {
        $writer.text($value, $max)
    };
}

macro_rules! get {
    ($reader:expr, $field:ident) => {
        Wire::get($reader, stringify!($field))?
    };
    ($reader:expr, $field:ident, as $wide:ident) => {
        match $wide::get($reader, stringify!($field))? {
            flag @ (0 | 1) => flag == 1,
            other => return Err(malformed(stringify!($field), other, "0 or 1")),
        }
    };
    ($reader:expr, $field:ident, $max:ident) => {
        $reader.text(stringify!($field), $max)?
    };
}

pub(super) use {fields, get, messages, put};
