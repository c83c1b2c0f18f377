"use strict";
// The page of a test.
begin();
