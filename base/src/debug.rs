//! `Debug` of types that have fields without it.

/// Implements `Debug` for a type by the values that tell most of it:
/// `debug_fields!(Lease, lease => len: lease.len());`.
#[macro_export]
macro_rules! debug_fields {
    ($type:ident, $this:ident => $($name:ident: $value:expr),+) => {
        impl std::fmt::Debug for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let $this = self;
                f.debug_struct(stringify!($type))$(.field(stringify!($name), &$value))+.finish_non_exhaustive()
            }
        }
    };
}
