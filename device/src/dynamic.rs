//! The libraries of engines, which are looked for at run time.

use std::mem::ManuallyDrop;

use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};

/// A library, loaded until the process ends: the libraries of engines have threads and state of their own.
pub(super) struct Dynamic {
    loaded: ManuallyDrop<Library>,
    /// File name of the library.
    pub(super) name: &'static str,
    /// What to do about a function that is missing.
    update: &'static str,
}

impl Dynamic {
    /// Loads the first of these libraries that the system has.
    pub(super) fn load(names: &[&'static str], update: &'static str) -> Option<Self> {
        names.iter().find_map(|name| {
            // SAFETY: loads a system library by name and runs its constructors, which are trusted like those of any
            // linked library.
            let loaded = unsafe { Library::open(Some(*name), RTLD_LAZY | RTLD_LOCAL) }.ok()?;
            Some(Dynamic { loaded: ManuallyDrop::new(loaded), name, update })
        })
    }

    /// Finds a function by its symbol.
    ///
    /// # Safety
    /// `F` must be the type that the library's header declares for the symbol.
    pub(super) unsafe fn find<F: Copy>(&self, symbol: &str) -> Result<F, String> {
        // SAFETY: the caller vouches for the type. The library is never unloaded.
        unsafe { self.loaded.get::<F>(symbol.as_bytes()) }
            .map(|function| *function)
            .map_err(|_| format!("{} has no {symbol}; {}", self.name, self.update))
    }
}

/// Declares functions of a library: their symbols, and their types as the library's header has them.
macro_rules! functions {
    ($(#[$doc:meta])* $name:ident {
        $($(#[$field_doc:meta])* $field:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*
    }) => {
        $(#[$doc])*
        pub(super) struct $name {
            $($(#[$field_doc])* pub(super) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl $name {
            fn find(library: &Dynamic) -> Result<Self, String> {
                // SAFETY: the types are those of the header.
                unsafe { Ok($name { $($field: library.find($symbol)?,)* }) }
            }
        }
    };
}

pub(super) use functions;
